"""Tile sizes of matmuls with quantized weights. They are estimates, except where a comment says what was measured."""

from dataclasses import dataclass

import torch

from ingot.backends.triton.lower.linear.tiles import Product, Tiles
from ingot.backends.triton.lower.quant.form import StoredForm
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.lower.sizes import power_of_two

# Rows of a tile: those of one tensor-core instruction of Hopper. float32 uses no tensor cores, and more registers.
_ROWS = 64
_ROWS_F32 = 32
# Programs per multiprocessor that run at once. Each has its part of the shared memory.
_PROGRAMS = 2
# The same for four-bit elements: on an H200, the best of a search with int4_g128, the matmuls of an 8B model, and 1, 16
# and 32 tokens had 2 to 7, mostly 3. The kernel has changed since (it multiplied each quarter of a chunk alone).
_PROGRAMS_FOUR_BITS = 3
_MOST_SPLITS = 8
# The least columns of a block, where rows have as many.
_COLUMNS = 128
_MOST_STAGES = 8
_MANY_STAGES = 4
# Lines of 128 bytes of each row that a program prefetches while the previous kernel runs.
_LINES = 4
# A thread of the kernel for one token loads 16 bytes of a row at once, which have one scale.
_BYTES = 16

# The kernel for one token in the tuning log.
QUANT_MATVEC = "quant_matvec"
# The kernel for one token: warps, rows of a block in registers before they are needed, and the fewest and most rows of
# the weight that a program multiplies, each with a sum in a register.
_MATVEC_WARPS = 4
_MATVEC_MOST_WARPS = 16
_MATVEC_HELD = 8
_MATVEC_LEAST = 4
_MATVEC_PROGRAMS = 2.2
_MATVEC_MOST = 32
# Programs that a multiprocessor runs at once, with 128 registers for a thread of 128. Two of a gate's leave room for
# those of the next kernel: a layer of an 8B model in int8 took 0.87 of its time so, on an H200.
_AT_ONCE = 4
_AT_ONCE_GATED = 2
# Rows that are prefetched where a program has few: the best of 0, 8 and 32 for those matmuls.
_MATVEC_FETCHED = 8
# The same for elements of four bits: the best of 16 tile sizes for each matmul of an 8B model, on an H200. If there are
# more groups of eight rows than run at once, few programs take all groups by turns.
_FOUR_BITS_ROWS = 8
_FOUR_BITS_TURNS = 2
# The same for f8e4m3, of 7 tile sizes: x takes most registers there, so a row is one block of up to 16 warps. The x of
# longer rows would not fit into registers.
_F8_TURNS = 1
_F8_LONG = 8192
_F8_MOST = 16384
# The same if tensor cores multiply, of 12 to 22 tile sizes: rows of a program, those of gate and up together, and warps
# that run at once. A layer of an 8B model took 0.78 to 0.89 of its time without tensor cores.
_CORES_ROWS = 8
_CORES_ROWS_LONG = 4
_CORES_WARPS = 16
# Experts of few tokens: rows of a program, the best of GPT-OSS-20B in MXFP4 and Qwen3-30B-A3B in int4 on an H200. Some
# threads are left without columns there: with as many as columns need, the kernels took up to 1.3 times as long.
_EXPERT_ROWS = 4
_EXPERT_COLUMNS = 1.4


@dataclass(frozen=True)
class QuantMatvecTiles:
    """The tile sizes and launch parameters of the matmul kernel for one token and a quantized weight (`quant_matvec`).

    A program computes groups of `rows` results, from blocks of `block_k` columns of the weight. Of `held` rows, a block
    is in registers before it is needed. Each multiprocessor runs up to `programs` programs at once, and there are no
    more of them; 0: each group has a program.

    A program prefetches `fetched` more rows, a power of two or 0, before it waits for the previous kernel. With `cores`
    1, tensor cores multiply, if `cores_fit`. A thread has at most `registers` registers; 0: as many as let `programs`
    programs run at once.
    """

    rows: int
    block_k: int
    warps: int
    held: int
    programs: int = 0
    fetched: int = 0
    cores: int = 0
    registers: int = 0


def cores_fit(product: Product, form: StoredForm, tiles: QuantMatvecTiles) -> bool:
    """Return whether tensor cores can multiply one token by an f8e4m3 weight, with tiles of these sizes.

    Both have codes that are exact in f16. A row is one block, each thread has a chunk, and rows are pairs. Four chunks
    that a warp adds up have one scale.
    """
    columns, threads = form.elements.scale_columns, 32 * tiles.warps
    return (
        form.elements.element == form.rounded.element == "f8e4m3"
        and product.depth <= tiles.block_k
        and tiles.block_k >= threads * chunk_of(form)
        and tiles.held % 2 == 0
        and (product.gated or tiles.rows % 2 == 0)
        and all(width % (4 * chunk_of(form)) == 0 for width in (columns, form.rounded.columns))
    )


def matvec_tiles(product: Product, form: StoredForm, cores: int) -> QuantMatvecTiles:
    """Return the tile sizes of a matmul with one row of x, on a device with `cores` multiprocessors."""
    if form.elements.chunk:
        return _four_bits_tiles(product, form, cores)
    chunk = chunk_of(form)
    width = power_of_two(product.depth)
    if cores_fit(product, form, by_cores := _cores_tiles(product, form)):
        return by_cores
    if form.elements.element == "f8e4m3" and _F8_LONG < width <= _F8_MOST:
        return QuantMatvecTiles(4, width, min(_MATVEC_MOST_WARPS, width // (32 * chunk)), held=4, programs=_F8_TURNS)
    if form.elements.element == "f8e4m3" and product.gated and _F8_LONG // 2 <= width <= _F8_LONG:
        return QuantMatvecTiles(8, width, width // (32 * chunk), held=16, programs=_F8_TURNS)
    # Each program prepares x for itself, so it has as many rows of the weight as leave almost two programs for each
    # multiprocessor.
    block_k = max(chunk, min(chunk * 32 * _MATVEC_WARPS, width))
    most = _MATVEC_MOST // (2 if product.gated else 1)
    rows = _MATVEC_LEAST
    while rows < most and product.columns >= 2 * rows * _MATVEC_PROGRAMS * cores:
        rows *= 2
    programs, fetched = _AT_ONCE_GATED if product.gated else _AT_ONCE, _MATVEC_FETCHED if rows <= _MATVEC_FETCHED else 0
    return QuantMatvecTiles(rows, block_k, _MATVEC_WARPS, min(_MATVEC_HELD, rows), programs, fetched)


def _cores_tiles(product: Product, form: StoredForm) -> QuantMatvecTiles:
    """Return the tile sizes for tensor cores, which `cores_fit` must still accept."""
    width = power_of_two(product.depth)
    chunks, parts = (2, _CORES_ROWS_LONG) if width > _F8_LONG else (1, _CORES_ROWS)
    warps = max(1, min(_CORES_WARPS, width // (32 * chunk_of(form) * chunks)))
    rows = parts // (2 if product.gated else 1)
    programs = _CORES_WARPS // warps
    return QuantMatvecTiles(rows, width, warps, parts, programs, cores=1)


def _four_bits_tiles(product: Product, form: StoredForm, cores: int) -> QuantMatvecTiles:
    chunk = chunk_of(form)
    block_k = max(chunk, min(chunk * 32 * _MATVEC_WARPS, power_of_two(product.depth)))
    at_once = _AT_ONCE * cores
    if product.columns <= _FOUR_BITS_ROWS * at_once:
        rows = _MATVEC_LEAST if product.columns <= _MATVEC_LEAST * at_once else _FOUR_BITS_ROWS
        return QuantMatvecTiles(rows, block_k, _MATVEC_WARPS, held=_MATVEC_HELD)
    if product.columns <= 2 * _FOUR_BITS_ROWS * at_once and not product.gated:
        return QuantMatvecTiles(2 * _FOUR_BITS_ROWS, block_k, _MATVEC_WARPS, _MATVEC_HELD, _AT_ONCE)
    return QuantMatvecTiles(_FOUR_BITS_ROWS, block_k, _MATVEC_WARPS, 2 * _MATVEC_HELD, _FOUR_BITS_TURNS)


def expert_row_tiles(depth: int, form: StoredForm) -> QuantMatvecTiles:
    """Return the tile sizes of a matmul of choices one by one, of `depth` columns."""
    chunk, warps = chunk_of(form), 1
    while warps < _MATVEC_WARPS and chunk * 32 * warps < _EXPERT_COLUMNS * depth:
        warps *= 2
    return QuantMatvecTiles(_EXPERT_ROWS, chunk * 32 * warps, warps, held=2 * _EXPERT_ROWS)


def quant_tiles(product: Product, form: StoredForm, tokens: int, cores: int, sm: int) -> Tiles:
    """Return the tile sizes of a matmul for a kernel of `tokens` rows of x on a device with `cores` multiprocessors.

    There are about as many programs as run at once, and each has as many blocks in flight as fit.
    """
    rows = _rows(form, _ROWS)
    blocks = -(-product.columns // rows)
    # Small groups are parts of a block, so that a block is not smaller than elsewhere.
    block_k = form.block_k * max(1, min(_COLUMNS, product.depth) // form.block_k)
    most = max(1, product.depth // (2 * block_k))
    programs = _PROGRAMS_FOUR_BITS if form.elements.chunk else _PROGRAMS
    splits = max(1, min(round(programs * cores / blocks), _MOST_SPLITS, most))
    stages = min(
        _MOST_STAGES, shared_memory(sm) // programs // stage_bytes(form, rows, block_k, product.gated, tokens) - 1
    )
    return Tiles(rows, block_k, splits, warps=4, stages=max(2, stages), lines=_LINES)


def many_tiles(form: StoredForm, gated: bool, sm: int, splits: int = 1) -> tuple[int, Tiles]:
    """Return the rows of x per program and the tile sizes of a matmul for many rows of x.

    The sums of a tile are in registers, twice if the weight has scales of columns, again if a program adds several
    splits, and all of it twice if there is a gate.
    """
    most = (64 if gated else 128) // (2 if splits > 1 else 1)
    tokens, rows = _rows(form, most), _rows(form, 128)
    stages = min(_MANY_STAGES, shared_memory(sm) // stage_bytes(form, rows, form.block_k, gated, tokens) - 1)
    return tokens, Tiles(rows, form.block_k, splits, warps=4 if rows == _ROWS_F32 else 8, stages=max(1, stages))


def _rows(form: StoredForm, rows: int) -> int:
    return _ROWS_F32 if form.codes is torch.float32 else rows


def chunk_of(form: StoredForm) -> int:
    """Return how many columns of the weight a thread of the kernel for one token multiplies at once."""
    return _BYTES * (2 if form.elements.chunk else 1)


def stage_bytes(form: StoredForm, rows: int, block_k: int, gated: bool, tokens: int) -> int:
    """Return the bytes of a block of the weight and of x in shared memory."""
    weights = block_k // 2 if form.elements.chunk else block_k
    return rows * (2 if gated else 1) * weights + tokens * block_k * form.codes.itemsize
