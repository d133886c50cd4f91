"""The tile sizes of the matmul kernel for one token and a quantized weight that benchmarks search."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ingot.backends.triton.lower.linear.tiles import Product
from ingot.backends.triton.lower.quant.tiles import QuantMatvecTiles
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.ir.formats import Format

_BYTES = 512  # of a row, that a warp loads at once
_LONG = 8192  # rows of more bytes take several chunks of a thread

# Rows of the weight that a program multiplies (those of gate and up together), rows held in registers, programs at
# once, rows prefetched, registers (0: by programs), and the share of a row's chunks that threads load at once.
# The held rows divide the rows of a program: else the compiler copies registers, and waits for their loads.
_CORES: Sequence[tuple[int, int, int, int, int, int]] = (
    (16, 16, 1, 0, 128, 1),
    (16, 16, 1, 16, 128, 1),
    (16, 8, 1, 16, 128, 1),
    (8, 8, 1, 8, 128, 1),
    (8, 8, 2, 0, 0, 1),
    (8, 8, 2, 8, 0, 1),
    (8, 8, 2, 32, 0, 1),
    (16, 8, 2, 16, 0, 1),
    (8, 8, 3, 8, 0, 1),
    (4, 4, 3, 16, 0, 1),
    (8, 8, 4, 8, 0, 2),
    (8, 8, 2, 16, 0, 2),
    (16, 8, 3, 16, 0, 2),
)
_CORES_LONG: Sequence[tuple[int, int, int, int, int, int]] = (
    (4, 4, 1, 0, 128, 2),
    (4, 4, 1, 8, 128, 2),
    (8, 8, 1, 0, 128, 2),
    (8, 8, 1, 8, 128, 2),
    (8, 4, 1, 8, 128, 2),
    (2, 2, 2, 8, 0, 2),
    (4, 4, 1, 4, 64, 1),
    (4, 2, 1, 8, 64, 1),
    (2, 2, 1, 8, 64, 2),
    (2, 2, 2, 8, 0, 4),
    (4, 4, 1, 8, 0, 4),
)


def one_token_tiles(base: QuantMatvecTiles, product: Product, format: Format) -> list[QuantMatvecTiles]:
    """Return the tile sizes to search, without doubles. The first ones are `base`, those of a compile."""
    float8 = format.element == "f8e4m3"
    rounded = format.activations is not None and format.activations.element == "f8e4m3"
    found = [base, *_by_lanes(base, product, float8)]
    if float8 and rounded:
        found += _by_cores(product)
    return list(dict.fromkeys(found))


def _by_lanes(base: QuantMatvecTiles, product: Product, float8: bool) -> Iterator[QuantMatvecTiles]:
    parts = base.rows * (2 if product.gated else 1)
    for fetched in (8, 32):
        yield replace(base, fetched=fetched)
    yield replace(base, held=min(parts, 8), programs=2)
    yield replace(base, held=min(parts, 8), programs=3, fetched=8)
    yield replace(base, held=parts, programs=1, registers=128, fetched=8)
    yield replace(base, rows=max(2, base.rows // 2), held=min(8, max(1, parts // 2)), fetched=8)
    if float8 and product.depth <= _LONG:
        width = power_of_two(product.depth)
        rows = 4 if product.gated else 8
        for programs, fetched in ((1, 8), (2, 8)):
            yield QuantMatvecTiles(rows, width, width // _BYTES, 8, programs, fetched=fetched)


def _by_cores(product: Product) -> Iterator[QuantMatvecTiles]:
    width = power_of_two(product.depth)
    for parts, held, programs, fetched, registers, chunks in _CORES_LONG if width > _LONG else _CORES:
        rows, warps = parts // (2 if product.gated else 1), width // (_BYTES * chunks)
        if rows and warps:
            yield QuantMatvecTiles(rows, width, warps, held, programs, fetched, cores=1, registers=registers)
