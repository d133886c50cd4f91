"""Lowering of the experts of a mixture: choices of few tokens one by one, those of more tokens in blocks of one expert.

Grids and buffers depend on the number of tokens alone, and kernels read the routing on the device. So a CUDA graph can
hold the launches, whatever the router chooses. A bucket class may hold several ranges of tokens with launches of their
own. Those for other ranges have empty grids, which are not launched.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Any, TypeVar

import torch

from ingot.backends.triton.kernels.experts.groups import LISTED, WORK, add_choices, group_choices, list_blocks
from ingot.backends.triton.kernels.experts.matvec import experts_down_rows, experts_up_rows
from ingot.backends.triton.kernels.experts.tile import experts_down_tile, experts_up_tile
from ingot.backends.triton.kernels.quant.columns import row_size
from ingot.backends.triton.launches import Expr, cdiv, greatest, least, minus, plus, times
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.experts.blocks import Blocks
from ingot.backends.triton.lower.experts.call import Experts, read_experts
from ingot.backends.triton.lower.experts.fragments import blocks_of
from ingot.backends.triton.lower.experts.problem import EXPERTS, ExpertsProblem
from ingot.backends.triton.lower.experts.quant import (
    down_alone,
    down_blocks,
    hidden_chunk,
    prepared_hidden,
    prepared_x,
    up_alone,
    up_blocks,
    x_chunk,
)
from ingot.backends.triton.lower.experts.tiles import (
    GroupTiles,
    Range,
    RowTiles,
    group_tiles,
    invariant_block,
    invariant_tiles,
    ranges_of,
    row_tiles,
)
from ingot.backends.triton.lower.experts.warpgroups import add_warpgroups, takes_warpgroups
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.rows import block_of
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS
from ingot.ir.ops.expert_weights import WEIGHTS

# Choices that a program of `group_choices` looks at together in steps of few tokens, and in others, where it goes
# through tens of thousands: 4 and 16 for each thread.
_LOOKED_AT_FEW, _LOOKED_AT = 512, 8192

ChosenTiles = TypeVar("ChosenTiles", RowTiles, GroupTiles)


def lower_experts(
    call: Call, schedule: Schedule, block: int | None = None, residual: Value | None = None
) -> tuple[Value, ...]:
    """Add the launches of a call of `experts` to `schedule`, and return the result.

    `block` is the number of choices in a block, or 1 for choices one by one. If it is None, it depends on the number of
    rows and the bucket class. The last launch adds `residual` [rows, hidden], unless it is None. It has the dtype of x,
    and stride 1 along its last axis. Raises Refused if no kernel supports the call.
    """
    one = read_experts(call, schedule.sm, residual)
    low, high = _rows_in(one.rows, schedule)
    result = schedule.output(call.results[0])
    few = blocks_of(one.packings, one.dtype, schedule.sm)
    if schedule.bucket.batch_invariant:
        # Steps of all sizes run the same machine code, so the bits of a row are the same in all of them.
        ranges = [Range(low, high, invariant_block(one.dtype.itemsize))]
    elif block is not None:
        call.want(block > 1 or one.alone, "no kernel for choices one by one in a format of the weights")
        call.want(block in (1, *(size for _, size in few)) or block >= LEAST, f"no kernel for blocks of {block}")
        ranges = [Range(low, high, block)]
    else:
        f32 = one.dtype is torch.float32
        ranges = ranges_of(low, high, one.experts, one.top_k, f32, alone=one.alone, few=few)
    # The results of gate and up, by the elements that a row of them takes.
    made_rows: dict[int, Value] = {}

    def hidden(chunk: int) -> Value:
        size = row_size(one.ffn, chunk)
        if size not in made_rows:
            made_rows[size] = schedule.scratch(one.dtype, (one.choices, size))
        return made_rows[size]

    for part in ranges:
        if part.block == 1:
            _alone(one, schedule, _share(one.rows, part, low, high), hidden(0), result)
    grouped = [part for part in ranges if part.block > 1]
    if grouped:
        all_grouped = _share(one.rows, Range(grouped[0].least, grouped[-1].most, 0), low, high)
        order, counts = _group(one, schedule, all_grouped, high)
        made = schedule.scratch(one.dtype, (one.choices, one.hidden))
        for (_, chunk), same in groupby(grouped, lambda part: _orders(one, schedule.sm, part.block)):
            parts = list(same)
            here = _share(one.rows, Range(parts[0].least, parts[-1].most, 0), low, high)
            x = prepared_x(one, schedule, here, parts[0].block)
            for part in parts:
                here = _share(one.rows, part, low, high)
                blocks = _blocks(one, schedule, here, part.block, order, counts)
                _in_blocks(one, schedule, here, blocks, x, hidden(chunk), made)
        _add(one, schedule, all_grouped, made, result)
    return (result,)


def _orders(one: Experts, sm: int, block: int) -> tuple[int, int]:
    """Return the orders of columns of x, and of the results of gate and up, with blocks of `block` choices."""
    return x_chunk(one, sm, block), hidden_chunk(one, sm, block)


def _rows_in(rows: Expr, schedule: Schedule) -> tuple[int, int]:
    """Return the least and the most rows of x in a step of the bucket class.

    Raises Refused if the number of rows is a dim other than T, L and B.
    """
    if isinstance(rows, int):
        return rows, rows
    if rows not in ("T", "L", "B"):
        raise Refused(f"experts of '{rows}' rows; T, L and B are supported")
    low, high = schedule.bucket.tokens
    return low if rows == "T" else 1, high


def _share(rows: Expr, part: Range, low: int, high: int) -> Expr:
    """Return 1 for numbers of rows within a range, and 0 for others. All are within `low` to `high`."""
    inside: Expr = 1
    if part.least > low:
        inside = least(1, greatest(0, minus(rows, part.least - 1)))
    if part.most < high:
        inside = times(inside, least(1, greatest(0, minus(part.most + 1, rows))))
    return inside


def _alone(one: Experts, schedule: Schedule, here: Expr, hidden: Value, result: Value) -> None:
    """Add the two launches that take each choice alone. `here` is 1 for the steps that they are for, else 0."""
    if (quantized := one.quantized.get("gate_up")) is not None:
        up_alone(one, quantized, schedule, here, hidden)
    else:
        _up_alone(one, schedule, here, hidden)
    if (quantized := one.quantized.get("down")) is not None:
        down_alone(one, quantized, schedule, here, hidden, result)
    else:
        _down_alone(one, schedule, here, hidden, result)


def _up_alone(one: Experts, schedule: Schedule, here: Expr, hidden: Value) -> None:
    call = one.call
    up = _chosen(one.problem(True, 1), row_tiles(one.hidden, one.dtype.itemsize, 0), schedule)
    gate_up, loader = one.weight("gate_up")
    schedule.launch(
        experts_up_rows,
        (cdiv(one.ffn, up.block_n), times(here, one.choices)),
        {
            "x": one.x,
            "weights": call.value("weights"),
            "chosen": call.value("chosen"),
            "gate_up": gate_up,
            "bias": call.optional("gate_up_bias"),
            "hidden": hidden,
        },
        {
            "TOP_K": one.top_k,
            "F": one.ffn,
            "K": one.hidden,
            **_constants(one),
            "BLOCK_N": up.block_n,
            "BLOCK_K": up.block_k,
            **loader,
            "DEPENDENT": schedule.dependent,
        },
        warps=up.warps,
        dependent=schedule.dependent,
    )


def _down_alone(one: Experts, schedule: Schedule, here: Expr, hidden: Value, result: Value) -> None:
    call = one.call
    down = _chosen(one.problem(False, 1), row_tiles(one.ffn, one.dtype.itemsize, one.top_k), schedule)
    down_weight, loader = one.weight("down")
    schedule.launch(
        experts_down_rows,
        (cdiv(one.hidden, down.block_n), times(here, one.rows)),
        {
            "hidden": hidden,
            "weights": call.value("weights"),
            "chosen": call.value("chosen"),
            "down": down_weight,
            "bias": call.optional("down_bias"),
            "residual": one.residual,
            "y": result,
        },
        {
            "TOP_K": one.top_k,
            "N": one.hidden,
            "K": one.ffn,
            "RESIDUAL_STRIDE": one.residual_stride,
            "WEIGH": not one.weigh_input,
            "BLOCK_N": down.block_n,
            "BLOCK_K": down.block_k,
            **loader,
            "DEPENDENT": schedule.dependent,
        },
        warps=down.warps,
        dependent=schedule.dependent,
    )


def _group(one: Experts, schedule: Schedule, here: Expr, most: int) -> tuple[Value, Value]:
    """Add the launch that sorts choices by expert, and return their order and the counts of experts.

    `here` is 1 for the steps that it is for, else 0. A step has up to `most` rows.
    """
    order = schedule.scratch(torch.int32, (one.choices,))
    counts = schedule.scratch(torch.int32, (one.experts,))
    few = most <= GPU_FEW_TOKENS and not schedule.bucket.batch_invariant
    block = min(_LOOKED_AT_FEW, power_of_two(most * one.top_k)) if few else _LOOKED_AT
    schedule.launch(
        group_choices,
        (times(here, one.experts),),
        {"chosen": one.call.value("chosen"), "order": order, "counts": counts, "choices": one.choices},
        {"BLOCK": block, "DEPENDENT": schedule.dependent},
        warps=4 if few else 16,
        dependent=schedule.dependent,
    )
    return order, counts


def _blocks(one: Experts, schedule: Schedule, here: Expr, block: int, order: Value, counts: Value) -> Blocks:
    """Return the blocks of `block` choices of a step, and add the launch that lists them if a kernel needs it.

    `here` is 1 for the steps that they are for, else 0.
    """
    # Each expert with choices needs a block, and one more for each `block` choices after the first.
    some = least(one.choices, one.experts)
    count = plus(some, cdiv(minus(one.choices, some), block))
    constants = {
        "EXPERTS": one.experts,
        "TOKENS": block,
        "BLOCK_EXPERTS": power_of_two(one.experts),
        "DEPENDENT": schedule.dependent,
    }
    listed, work = None, None
    if any(takes_warpgroups(one, name, schedule.sm, block) for name in WEIGHTS):
        listed = schedule.scratch(torch.int32, (count, LISTED.value))
        work = schedule.scratch(torch.int32, (WORK.value,))
        schedule.launch(
            list_blocks,
            (times(here, one.experts),),
            {"counts": counts, "listed": listed, "work": work},
            constants,
            warps=1,
            dependent=schedule.dependent,
        )
    return Blocks(block, order, counts, count, constants, listed, work)


def _in_blocks(
    one: Experts,
    schedule: Schedule,
    here: Expr,
    blocks: Blocks,
    x: tuple[Value, Value | None],
    hidden: Value,
    made: Value,
) -> None:
    """Add the launches that take blocks of choices. `here` is 1 for the steps that they are for, else 0."""
    chunk = hidden_chunk(one, schedule.sm, blocks.choices)
    if takes_warpgroups(one, "gate_up", schedule.sm, blocks.choices):
        add_warpgroups(one, "gate_up", schedule, here, blocks, x[0], hidden, chunk)
    elif (quantized := one.quantized.get("gate_up")) is not None:
        up_blocks(one, quantized, schedule, here, blocks, x, hidden)
    else:
        _up_blocks(one, schedule, here, blocks, hidden)
    rows = prepared_hidden(one, schedule, here, blocks.choices, hidden)
    if takes_warpgroups(one, "down", schedule.sm, blocks.choices):
        add_warpgroups(one, "down", schedule, here, blocks, rows[0], made, 0)
    elif (quantized := one.quantized.get("down")) is not None:
        down_blocks(one, quantized, schedule, here, blocks, rows, made)
    else:
        _down_blocks(one, schedule, here, blocks, hidden, made)


def _group_tiles(one: Experts, schedule: Schedule, block: int, *, gated: bool) -> GroupTiles:
    itemsize, problem = one.dtype.itemsize, one.problem(gated, block)
    if schedule.bucket.batch_invariant:
        return invariant_tiles(problem.depth, itemsize)
    known = group_tiles(problem.columns, problem.depth, gated, block, itemsize, schedule.sm)
    return _chosen(problem, known, schedule)


def _eviction(block: int) -> str:
    """Return the cache policy of weights: with few choices they are read about once, and evicted first."""
    return "evict_first" if block < 64 else ""


def _up_blocks(one: Experts, schedule: Schedule, here: Expr, blocks: Blocks, hidden: Value) -> None:
    call, up = one.call, _group_tiles(one, schedule, blocks.choices, gated=True)
    gate_up, loader = one.weight("gate_up")
    schedule.launch(
        experts_up_tile,
        (times(times(here, blocks.count), -(-one.ffn // up.block_n)),),
        {
            "x": one.x,
            "weights": call.value("weights"),
            "gate_up": gate_up,
            "bias": call.optional("gate_up_bias"),
            "hidden": hidden,
            **blocks.arguments,
        },
        {
            "TOP_K": one.top_k,
            "F": one.ffn,
            "K": one.hidden,
            **_constants(one),
            **blocks.constants,
            **_tiles(up, blocks),
            **loader,
        },
        warps=up.warps,
        stages=up.stages,
        dependent=schedule.dependent,
    )


def _down_blocks(one: Experts, schedule: Schedule, here: Expr, blocks: Blocks, hidden: Value, made: Value) -> None:
    call, down = one.call, _group_tiles(one, schedule, blocks.choices, gated=False)
    down_weight, loader = one.weight("down")
    schedule.launch(
        experts_down_tile,
        (times(times(here, blocks.count), -(-one.hidden // down.block_n)),),
        {"down": down_weight, "bias": call.optional("down_bias"), "hidden": hidden, "made": made, **blocks.arguments},
        {"N": one.hidden, "K": one.ffn, **blocks.constants, **_tiles(down, blocks), **loader},
        warps=down.warps,
        stages=down.stages,
        dependent=schedule.dependent,
    )


def _chosen(problem: ExpertsProblem, known: ChosenTiles, schedule: Schedule) -> ChosenTiles:
    """Return the tile sizes of a matmul: `known`, unless the schedule was given others."""
    return schedule.choose(EXPERTS, problem.fields(), type(known), lambda: (known, "heuristic"))


def _tiles(chosen: GroupTiles, blocks: Blocks) -> dict[str, Any]:
    return {
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "TOGETHER": chosen.together,
        "EVICTION": _eviction(blocks.choices),
    }


def _constants(one: Experts) -> dict[str, Any]:
    """Return the constants of the kernels of gate and up with plain weights, besides sizes."""
    return {**one.activation(), "WEIGH": one.weigh_input, "X_STRIDE": one.x.strides[0]}


def _add(one: Experts, schedule: Schedule, here: Expr, made: Value, result: Value) -> None:
    """Add the launch that adds the results of a token's choices, and the residual.

    `here` is 1 for the steps that it is for, else 0.
    """
    block, warps = block_of(one.hidden)
    schedule.launch(
        add_choices,
        (times(here, one.rows), -(-one.hidden // block)),
        {"made": made, "weights": one.call.value("weights"), "residual": one.residual, "y": result},
        {
            "TOP_K": one.top_k,
            "WIDTH": one.hidden,
            "RESIDUAL_STRIDE": one.residual_stride,
            "WEIGH": not one.weigh_input,
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        dependent=schedule.dependent,
    )


LOWERINGS: Mapping[str, Lowering] = {"experts": lower_experts}
