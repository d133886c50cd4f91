"""Launches of the matmuls of experts with weights of f4e2m1, for blocks of few choices (`kernels/quant/fragments.py`).

A weight is read as it is stored. The columns of x are reordered.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ingot.backends.triton.kernels.experts.quant_fragments import (
    quant_experts_down_fragments,
    quant_experts_up_fragments,
)
from ingot.backends.triton.launches import Expr, times
from ingot.backends.triton.lower.experts.blocks import Blocks
from ingot.backends.triton.lower.experts.call import Experts, QuantizedExperts
from ingot.backends.triton.lower.experts.tiles import GroupTiles
from ingot.backends.triton.schedule import Argument, Schedule, Value
from ingot.ir.formats import find_format

# Rows of a tile of a warp. The columns that a lane has at once must have one scale.
_ROWS, _COLUMNS = 16, 32
# Choices of a block, by the most choices that an expert has on average. In blocks of 32, `quant_tile` is as fast (the
# experts of GPT-OSS 20B and 128 tokens, on an H200).
_BLOCKS = ((4, 8), (12, 16))
# The compute capability from which on the kernels' instructions exist.
_LEAST_SM = 90
# Rows of a program and its warps, with a gate and without one, and the registers of a thread, by choices of a block:
# the fastest of 10 to 16 on an H200, for the experts of GPT-OSS 20B and 32 or 64 tokens.
_TILES = {
    (8, True): GroupTiles(16, 4 * _COLUMNS, warps=2, stages=1),
    (8, False): GroupTiles(32, 4 * _COLUMNS, warps=2, stages=1),
    (16, True): GroupTiles(64, 4 * _COLUMNS, warps=4, stages=1),
    (16, False): GroupTiles(128, 4 * _COLUMNS, warps=4, stages=1),
}
_REGISTERS = {8: 128, 16: 168}
_ALL_REGISTERS = 65536  # of a multiprocessor, since compute capability 3.0 (CUDA C++ Programming Guide)


def reads_fragments(packing: str, dtype: torch.dtype, sm: int, block: int) -> bool:
    """Return whether the kernels multiply blocks of `block` choices by weights in the format `packing`.

    `dtype` is that of x, and `sm` the compute capability.
    """
    format = find_format(packing)
    return (
        format.element == "f4e2m1"
        and [(level.rows, level.columns, level.dtype) for level in format.levels]
        == [(1, _COLUMNS, torch.float8_e8m0fnu)]
        and format.activations is None
        and dtype is torch.bfloat16
        and sm >= _LEAST_SM
        and block in _REGISTERS
    )


def blocks_of(packings: Sequence[str], dtype: torch.dtype, sm: int) -> tuple[tuple[int, int], ...]:
    """Return the choices of blocks for weights in these formats, by the most that an expert has on average.

    It is empty unless the kernels support all of them. The other arguments are those of `reads_fragments`.
    """
    fit = packings and all(reads_fragments(packing, dtype, sm, _BLOCKS[-1][1]) for packing in packings)
    return _BLOCKS if fit else ()


def fragment_tiles(gated: bool, block: int) -> GroupTiles:
    """Return the tile sizes of a matmul with blocks of `block` choices."""
    return _TILES[block, gated]


def most_warps(block: int) -> int:
    """Return the most warps of a program: the largest power of two for which a multiprocessor has registers."""
    return 1 << (_ALL_REGISTERS // (32 * _REGISTERS[block])).bit_length() - 1


def fitting(chosen: GroupTiles, gated: bool, block: int) -> GroupTiles:
    """Return `chosen` with no more warps than fit, and no more rows than these have tiles for.

    A tuning log may have tile sizes that were measured with `quant_tile`, before these kernels existed.
    """
    rows, warps = _ROWS if gated else 2 * _ROWS, min(chosen.warps, most_warps(block))
    return replace(chosen, block_n=rows * max(1, min(chosen.block_n // rows, warps)), warps=warps)


def _shared(
    quantized: QuantizedExperts, blocks: Blocks, chosen: GroupTiles, rows: int
) -> tuple[dict[str, Argument], dict[str, object]]:
    """Return the arguments and the constants that both kernels take.

    `rows` rows of a program belong to each of its tiles.
    """
    arguments: dict[str, Argument] = {
        **blocks.arguments,
        "weight": quantized.arguments["weight"],
        "scales": quantized.arguments["scales"],
    }
    tiles = chosen.block_n // rows
    constants = {
        **blocks.constants,
        "TILES": tiles,
        "WAYS": chosen.warps // tiles,
        "TOGETHER": chosen.together,
        "SIZES": quantized.sizes,
        "ELEMENTS": quantized.form.elements,
    }
    return arguments, constants


def up_fragments(
    one: Experts,
    quantized: QuantizedExperts,
    schedule: Schedule,
    here: Expr,
    blocks: Blocks,
    x: Value,
    hidden: Value,
    chunk: int,
    chosen: GroupTiles,
) -> None:
    """Add the launch of gate and up for blocks of choices. `here` is 1 for its steps, else 0.

    x has its columns in the order FRAGMENTS (`kernels/quant/columns.py`), and those of `hidden` get the order `chunk`.
    """
    arguments, constants = _shared(quantized, blocks, chosen, _ROWS)
    schedule.launch(
        quant_experts_up_fragments,
        (times(times(here, blocks.count), -(-one.ffn // chosen.block_n)),),
        {
            "x": x,
            **arguments,
            "bias": one.call.optional("gate_up_bias"),
            "hidden": hidden,
        },
        {
            "TOP_K": one.top_k,
            "F": one.ffn,
            "K": one.hidden,
            **one.activation(),
            **constants,
            "CHUNK": chunk,
        },
        warps=chosen.warps,
        registers=_REGISTERS[blocks.choices],
        dependent=schedule.dependent,
    )


def down_fragments(
    one: Experts,
    quantized: QuantizedExperts,
    schedule: Schedule,
    here: Expr,
    blocks: Blocks,
    hidden: Value,
    made: Value,
    chosen: GroupTiles,
) -> None:
    """Add the launch of down for blocks of choices. `here` is 1 for its steps, else 0.

    `hidden` has its columns in the order FRAGMENTS.
    """
    arguments, constants = _shared(quantized, blocks, chosen, 2 * _ROWS)
    schedule.launch(
        quant_experts_down_fragments,
        (times(times(here, blocks.count), -(-one.hidden // chosen.block_n)),),
        {
            "hidden": hidden,
            **arguments,
            "bias": one.call.optional("down_bias"),
            "made": made,
        },
        {
            "N": one.hidden,
            "K": one.ffn,
            **constants,
        },
        warps=chosen.warps,
        registers=_REGISTERS[blocks.choices],
        dependent=schedule.dependent,
    )
