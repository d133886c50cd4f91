"""Add the launches of a matmul to a schedule: one function per matmul kernel."""

from typing import Any

import torch

from ingot.backends.triton.kernels.linear.blocks import linear_blocks
from ingot.backends.triton.kernels.linear.matvec import linear_matvec
from ingot.backends.triton.kernels.linear.tile import linear_tile
from ingot.backends.triton.kernels.norm import norm as norm_kernel
from ingot.backends.triton.launches import cdiv, times
from ingot.backends.triton.lower.linear.call import Linear, Norm, static_size
from ingot.backends.triton.lower.linear.invariant import BlockTiles, Sums
from ingot.backends.triton.lower.linear.tiles import MatvecTiles, Tiles
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.operands import loader_of
from ingot.backends.triton.schedule import Schedule, Value

# How many programs per multiprocessor can start while the previous kernel still runs, and then wait for its end.
_EARLY = 2


def launch_matvec(linear: Linear, schedule: Schedule, chosen: MatvecTiles) -> Value:
    """Add the launch of `linear_matvec`, the matmul kernel for one row of x, to `schedule`, and return the result."""
    result = schedule.output(linear.result)
    schedule.launch(
        linear_matvec,
        (-(-linear.columns // chosen.block_n), linear.rows),
        {
            "x": linear.x,
            "weight": linear.weight.argument,
            "y": result,
            "gain": linear.norm.weight if linear.norm else None,
            "bias": linear.bias,
            "residual": linear.residual,
        },
        {
            **_constants(linear),
            "EPS": linear.norm.eps if linear.norm else 0.0,
            "NORM": linear.norm is not None,
            "X_STRIDE": linear.x.strides[0],
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "LINES": chosen.lines,
            "AHEAD": chosen.ahead,
            "WAVE": _EARLY * schedule.cores,
            "FETCH": loader_of(linear.weight).fetch,
            "ROW_LINES": power_of_two(-(-linear.weight.row_bytes // 128)),
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        dependent=schedule.dependent,
    )
    return result


def launch_tile(linear: Linear, schedule: Schedule, tokens: int, chosen: Tiles, share: int) -> Value:
    """Add the launch of `linear_tile`, the tensor-core matmul kernel for up to `tokens` rows, and return the result.

    `chosen` are the tile sizes. Each split (part of K) sums over `share` columns of the weight.
    """
    x = linear.x if linear.norm is None else _normed(linear.x, linear.norm, schedule)
    result = schedule.output(linear.result)
    blocks = -(-linear.columns // chosen.block_n)
    split = chosen.splits > 1
    parts = 1 if linear.gate is None else 2
    sums = (chosen.splits, blocks, parts, chosen.block_n, tokens)
    schedule.launch(
        linear_tile,
        (blocks, chosen.splits),
        {
            "x": x,
            "weight": linear.weight.argument,
            "y": result,
            "bias": linear.bias,
            "residual": linear.residual,
            "partial": schedule.scratch(torch.float32, sums) if split else None,
            "arrivals": schedule.counter((blocks,)) if split else None,
            "rows": linear.rows,
        },
        {
            **_constants(linear),
            "X_STRIDE": x.strides[0],
            "TOKENS": tokens,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "SPLITS": chosen.splits,
            "SHARE": share,
            "FETCH": loader_of(linear.weight).fetch,
            "LINES": chosen.lines,
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        stages=chosen.stages,
        dependent=schedule.dependent,
    )
    return result


def launch_blocks(linear: Linear, schedule: Schedule, chosen: BlockTiles, sums: Sums) -> Value:
    """Add the launch of `linear_blocks`, the batch-invariant matmul kernel for many rows, and return the result.

    `chosen` are the tile sizes. `sums` is the order in which the kernel sums along K.
    """
    x = linear.x if linear.norm is None else _normed(linear.x, linear.norm, schedule)
    result = schedule.output(linear.result)
    schedule.launch(
        linear_blocks,
        (times(cdiv(linear.rows, chosen.tokens), -(-linear.columns // chosen.block_n)),),
        {
            "x": x,
            "weight": linear.weight.argument,
            "y": result,
            "bias": linear.bias,
            "residual": linear.residual,
            "rows": linear.rows,
        },
        {
            **_constants(linear),
            "X_STRIDE": x.strides[0],
            "TOKENS": chosen.tokens,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "SPLITS": sums.splits,
            "SHARE": sums.share,
            "TOGETHER": chosen.together,
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        stages=chosen.stages,
        dependent=schedule.dependent,
    )
    return result


def _normed(x: Value, norm: Norm, schedule: Schedule) -> Value:
    """Add a separate launch of the norm before a matmul of several rows, and return the normed x.

    A fused norm would make each program of the matmul kernel read all of x twice.
    """
    rows, depth = x.type.shape[0], static_size(x.type.shape[1])
    normed = schedule.scratch(x.type.dtype, (rows, depth))
    groups = {"GROUPS": 1, "X_GROUP": 0, "RESIDUAL_GROUP": 0, "WEIGHT_GROUP": 0, "BLOCK_GROUPS": 1}
    schedule.launch(
        norm_kernel,
        (rows, 1),
        {"x": x, "residual": None, "weight": norm.weight, "bias": None, "total": None, "result": normed},
        {
            **groups,
            "WIDTH": depth,
            "X_ROW": x.strides[0],
            "RESIDUAL_ROW": 0,
            "EPS": norm.eps,
            "CENTRED": False,
            "BLOCK": power_of_two(depth),
            "DEPENDENT": schedule.dependent,
        },
        warps=8,
        dependent=schedule.dependent,
    )
    return normed


def _constants(linear: Linear) -> dict[str, Any]:
    """Return the compile-time constants that all matmul kernels take, by name."""
    gate, loader = linear.gate, loader_of(linear.weight)
    return {
        "N": linear.columns,
        "K": linear.depth,
        "BEGIN": loader.begin,
        "WITHIN": loader.within,
        "LOAD": loader.load,
        "STORED": loader.stored(linear.weight, linear.x.type.dtype),
        "RESIDUAL_STRIDE": linear.residual.strides[0] if linear.residual else 0,
        "FIRST": gate.gate if gate else 0,
        "UP": gate.up if gate else 0,
        "GATED": gate is not None,
        "ACTIVATION": gate.activation if gate else linear.activation,
        "BIAS": linear.bias is not None,
        "RESIDUAL": linear.residual is not None,
    }
