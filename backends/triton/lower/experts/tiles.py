"""The tile sizes of the kernels of a mixture's experts, and the step sizes that they are for.

Those of the table `_FOLDED` were measured on a GPU. The others are estimated from sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ingot.backends.triton.lower.quant.form import StoredForm
from ingot.backends.triton.lower.quant.tiles import stage_bytes
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.ir.artifact.plan import GPU_FEW_TOKENS

# Most tokens of a step whose choices are multiplied one by one, and the least share of their experts that must be
# different ones: what is read twice costs as much time as the two launches that grouping takes.
_MOST_ALONE, _LEAST_DIFFERENT = 8, 0.9
# Choices of a block, by the most choices that an expert has on average. Padding computes, more blocks read weights
# again from the L2 cache.
_BLOCKS = ((24, 32), (96, 64))
LARGEST_BLOCK = 128
# float32 uses no tensor cores, and larger tiles would not fit into registers.
_BLOCK_F32, _TILE_F32 = 32, 32
# Iterations of `experts_down_rows`, which the compiler unrolls.
_MOST_UNROLLED = 16


@dataclass(frozen=True)
class RowTiles:
    """The tile sizes of the kernels that take each choice alone: `experts_up_rows` and `experts_down_rows`.

    A program computes `block_n` results, from `block_k` columns of the weight per iteration.
    """

    block_n: int
    block_k: int
    warps: int


@dataclass(frozen=True)
class GroupTiles:
    """The tile sizes of the kernels that take blocks of choices: `experts_up_tile`, `experts_down_tile` and others.

    A program computes `block_n` columns of the results, with `stages` blocks of `block_k` columns of the weight in
    flight. `together` successive programs read the same rows of a weight if their blocks have one expert. The kernels
    of `quant_fragments.py` have `block_k` and `stages` of their own.
    """

    block_n: int
    block_k: int
    warps: int
    stages: int
    together: int = 1


# Tiles of quantized weights whose scales multiply their elements, by choices of a block and whether there is a gate:
# the fastest of 12 to 28 on an H200, for the experts of GPT-OSS 20B in MXFP4 and 8, 32, 512 and 4096 tokens
# (benchmarks/kernels/experts.py --sweep). With eight warps, half of them convert the same elements as the others.
_FOLDED = {
    (16, True): GroupTiles(128, 64, warps=4, stages=5),
    (16, False): GroupTiles(64, 128, warps=4, stages=6),
    (32, True): GroupTiles(128, 64, warps=4, stages=4),
    (32, False): GroupTiles(128, 64, warps=4, stages=6),
    (64, True): GroupTiles(64, 64, warps=4, stages=4),
    (64, False): GroupTiles(128, 64, warps=4, stages=4),
    (128, True): GroupTiles(64, 64, warps=4, stages=3, together=8),
    (128, False): GroupTiles(128, 64, warps=4, stages=3, together=8),
}


@dataclass(frozen=True)
class Range:
    """The steps of `least` to `most` tokens, whose choices come in blocks of `block`; 1: each choice alone."""

    least: int
    most: int
    block: int


def ranges_of(
    least: int,
    most: int,
    experts: int,
    top_k: int,
    f32: bool,
    *,
    alone: bool = True,
    few: Sequence[tuple[int, int]] = (),
) -> list[Range]:
    """Return how steps of `least` to `most` tokens take their choices, by ranges of tokens that cover them in order.

    `alone` says whether there are kernels for choices one by one. `few` are choices of a block for which there are
    kernels of their own, by the most choices that an expert has on average.
    """
    counts = (count for count in range(1, _MOST_ALONE + 1) if count == 1 or _different(count, experts, top_k))
    last = max(counts) if alone else 0
    blocks = [*few, *(_BLOCKS if most > GPU_FEW_TOKENS else ())]
    ends = [(last, 1), *((max(last, mean * experts // top_k), block) for mean, block in blocks)]
    if most <= GPU_FEW_TOKENS:
        ends.append((most, 16 if most <= 16 else 32))
    else:
        ends.append((most, LARGEST_BLOCK))
    found: list[Range] = []
    begin = least
    for end, block in ends:
        if begin <= min(end, most):
            block = min(block, _BLOCK_F32) if f32 else block
            if found and found[-1].block == block:
                begin = found.pop().least
            found.append(Range(begin, min(end, most), block))
            begin = min(end, most) + 1
    return found


def _different(tokens: int, experts: int, top_k: int) -> bool:
    """Return whether `tokens` tokens, each with `top_k` choices at random, have mostly different experts."""
    return experts * (1 - (1 - top_k / experts) ** tokens) >= _LEAST_DIFFERENT * tokens * top_k


def row_tiles(depth: int, itemsize: int, sums: int) -> RowTiles:
    """Return the tile sizes for choices that are computed alone, with results of `depth` terms each.

    `sums` is the number of choices that a program adds up; 0: it computes a gate and up of one choice.
    """
    block_k, warps = max(LEAST, min(2048 // itemsize, power_of_two(depth))), 4
    while sums * math.ceil(depth / block_k) > _MOST_UNROLLED and warps < 16 and block_k < depth:
        block_k, warps = 2 * block_k, 2 * warps
    # Few rows, because a program holds three blocks of them in registers.
    return RowTiles(4, block_k, warps)


def group_tiles(columns: int, depth: int, gated: bool, block: int, itemsize: int, sm: int) -> GroupTiles:
    """Return the tile sizes for blocks of `block` choices: `columns` results, with a gate pairs, of `depth` terms."""
    most_k = max(LEAST, power_of_two(depth))
    if itemsize == 4:
        return GroupTiles(_TILE_F32, min(_TILE_F32, most_k), warps=4, stages=2)
    if block == LARGEST_BLOCK:
        chosen = GroupTiles(128, min(64, most_k), warps=8, stages=3, together=8)
    elif gated:
        # Two programs fit into a multiprocessor: one loads while the other begins or ends. Few tokens leave room for
        # wider blocks of the weight, which need no mask if they divide its columns.
        wide = block <= 16
        block_k = 128 if wide and depth % 128 == 0 else 64
        chosen = GroupTiles(64, min(block_k, most_k), warps=4, stages=(6 if wide else 4) * 64 // block_k)
    else:
        chosen = GroupTiles(128, min(64, most_k), warps=4, stages=4)
    block_n = min(chosen.block_n, max(LEAST, power_of_two(columns)))
    staged = (block_n * (2 if gated else 1) + block) * chosen.block_k * itemsize
    stages = max(1, min(chosen.stages, shared_memory(sm) // staged))
    return GroupTiles(block_n, chosen.block_k, chosen.warps, stages, chosen.together)


def quant_group_tiles(columns: int, depth: int, gated: bool, block: int, form: StoredForm, sm: int) -> GroupTiles:
    """Return the tile sizes for blocks of `block` choices and a quantized weight, as for `group_tiles`.

    Sums of a block of columns are in registers besides those of all columns, so tiles have at most 64 rows with a gate.
    """
    if form.elements.fold >= 0 and form.codes is not torch.float32:
        return _folded_tiles(columns, depth, gated, block, form, sm)
    many = block >= 64
    rows = _TILE_F32 if form.codes is torch.float32 else 128 if many and not gated else 64
    blocks = max(1, min(64 if many else 128, depth) // form.block_k)
    block_k = form.block_k * (power_of_two(blocks + 1) // 2)  # the largest power of two that is not above
    staged = stage_bytes(form, rows, block_k, gated, block)
    stages = max(2, min(3 if many else 6, shared_memory(sm) // (1 if many else 2) // staged - 1))
    block_n = min(rows, max(LEAST, power_of_two(columns)))
    warps = 4 if form.codes is torch.float32 or not many else 8
    return GroupTiles(block_n, block_k, warps, stages, together=8 if block == LARGEST_BLOCK else 1)


def _folded_tiles(columns: int, depth: int, gated: bool, block: int, form: StoredForm, sm: int) -> GroupTiles:
    """Return the tile sizes for a quantized weight whose scales multiply its elements: those of the table, or the
    largest below them that fit the sizes."""
    known = _FOLDED[block, gated]
    block_k = max(min(known.block_k, power_of_two(depth)), form.block_k)
    staged = stage_bytes(form, known.block_n, block_k, gated, block)
    # As many columns in flight, whatever a block has.
    stages = max(2, min(known.stages * known.block_k // block_k, shared_memory(sm) // staged - 1, 6))
    return replace(known, block_n=min(known.block_n, max(LEAST, power_of_two(columns))), block_k=block_k, stages=stages)


def invariant_tiles(depth: int, itemsize: int) -> GroupTiles:
    """Return the tile sizes of steps of all sizes in deterministic mode: a compromise between few and many tokens.

    64 rows of the weight and four warps are what Hopper's tensor-core instruction takes.
    """
    if itemsize == 4:
        return GroupTiles(_TILE_F32, min(_TILE_F32, max(LEAST, power_of_two(depth))), warps=4, stages=2)
    return GroupTiles(64, min(64, max(LEAST, power_of_two(depth))), warps=4, stages=3, together=4)


def invariant_block(itemsize: int) -> int:
    """Return the number of choices in a block in deterministic mode."""
    return _BLOCK_F32 if itemsize == 4 else 64
