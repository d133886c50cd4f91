"""Lowering of the experts of a mixture: choices of few tokens one by one, those of more tokens in blocks of one expert.

Grids and buffers depend on the number of tokens alone, and kernels read the routing on the device. So a CUDA graph can
hold the launches, whatever the router chooses. A bucket class may hold several ranges of tokens with launches of their
own. Those for other ranges have empty grids, which are not launched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ingot.backends.triton.kernels.experts.groups import add_choices, group_choices
from ingot.backends.triton.kernels.experts.matvec import experts_down_rows, experts_up_rows
from ingot.backends.triton.kernels.experts.tile import experts_down_tile, experts_up_tile
from ingot.backends.triton.launches import Expr, cdiv, greatest, least, minus, plus, times
from ingot.backends.triton.lower.attention.heads import static
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.experts.problem import EXPERTS, ExpertsProblem
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
from ingot.backends.triton.lower.linear.weight import plain_weight
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.rows import FLOATS, block_of
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.operands import loader_of
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS
from ingot.ir.types import DTYPE_NAMES, TensorType

# Choices that a program of `group_choices` looks at together in steps of few tokens, and in others, where it goes
# through tens of thousands: 4 and 16 for each thread.
_LOOKED_AT_FEW, _LOOKED_AT = 512, 8192
_MOST_EXPERTS = 1024  # a thread of a block reads eight of the counts

ChosenTiles = TypeVar("ChosenTiles", RowTiles, GroupTiles)


@dataclass(frozen=True)
class _Experts:
    """A call of `experts`: its tensors, its sizes, and the constants that kernels take."""

    call: Call
    x: Value
    rows: Expr
    hidden: int
    ffn: int
    experts: int
    top_k: int
    weigh_input: bool

    @property
    def choices(self) -> Expr:
        return times(self.rows, self.top_k)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.type.dtype

    def problem(self, gated: bool, block: int) -> ExpertsProblem:
        columns, depth = (self.ffn, self.hidden) if gated else (self.hidden, self.ffn)
        name = DTYPE_NAMES[self.dtype]
        return ExpertsProblem(self.experts, self.top_k, columns, depth, gated, block, name)

    def weight(self, name: str) -> tuple[Value | tuple[Value, ...], dict[str, Any]]:
        """Return a weight of all experts [E, rows, depth] as the kernels' argument, and the constants of its loader.

        To the loader it is one matrix: the rows of expert e follow those of expert e - 1. A weight that is stored in
        another form needs a loader of its packing, and a change here alone.
        """
        value = self.call.value(name)
        experts, rows, depth = value.type.shape
        assert isinstance(experts, int) and isinstance(rows, int) and isinstance(depth, int)
        self.call.want(value.strides == (rows * depth, depth, 1), f"{name} is not contiguous: {value.type}")
        matrix = plain_weight(Value(TensorType(value.type.dtype, (experts * rows, depth)), value.input, value.buffer))
        loader = loader_of(matrix)
        stored = loader.stored(matrix, self.dtype)
        constants = {"BEGIN": loader.begin, "WITHIN": loader.within, "LOAD": loader.load, "STORED": stored}
        return matrix.argument, constants


def lower_experts(call: Call, schedule: Schedule, block: int | None = None) -> tuple[Value, ...]:
    """Add the launches of a call of `experts` to `schedule`, and return the result.

    `block` is the number of choices in a block, or 1 for choices one by one. If it is None, it depends on the number of
    rows and the bucket class. Raises Refused if no kernel supports the call.
    """
    one = _checked(call)
    low, high = _rows_in(one.rows, schedule)
    result = schedule.output(call.results[0])
    hidden = schedule.scratch(one.dtype, (one.choices, one.ffn))
    if schedule.bucket.batch_invariant:
        # Steps of all sizes run the same machine code, so the bits of a row are the same in all of them.
        ranges = [Range(low, high, invariant_block(one.dtype.itemsize))]
    elif block is not None:
        ranges = [Range(low, high, block)]
    else:
        ranges = ranges_of(low, high, one.experts, one.top_k, one.dtype is torch.float32)
    for part in ranges:
        if part.block == 1:
            _alone(one, schedule, _share(one.rows, part, low, high), hidden, result)
    grouped = [part for part in ranges if part.block > 1]
    if grouped:
        all_grouped = _share(one.rows, Range(grouped[0].least, grouped[-1].most, 0), low, high)
        order, counts = _group(one, schedule, all_grouped, high)
        made = schedule.scratch(one.dtype, (one.choices, one.hidden))
        for part in grouped:
            _blocks(one, schedule, part.block, _share(one.rows, part, low, high), order, counts, hidden, made)
        _add(one, schedule, all_grouped, made, result)
    return (result,)


def _checked(call: Call) -> _Experts:
    """Return the call's tensors and sizes. Raises Refused if the kernels do not support its dtypes or strides."""
    x, weights, chosen = (call.value(name) for name in ("x", "weights", "chosen"))
    dtype = x.type.dtype
    call.want(dtype in FLOATS, f"kernels compute on f32, bf16 and f16: {x.type}")
    call.want(len(x.type.shape) == 2, f"x is {x.type}, not [T, D]")
    call.want_dense_rows("x")
    call.want(weights.type.dtype is torch.float32, f"the weights of choices are not f32: {weights.type}")
    top_k = static(chosen, 1)
    for name in ("weights", "chosen"):
        call.want(call.value(name).strides == (top_k, 1), f"{name} is not contiguous: {call.value(name).type}")
    for name in ("gate_up_bias", "down_bias"):
        bias = call.optional(name)
        call.want(bias is None or bias.strides == (static(bias, 1), 1), f"{name} is not contiguous")
    for name in ("gate_up", "down"):
        format = call.attributes[f"{name}_format"]
        call.want(format == "plain", f"format {format}: no kernel for experts in it")
    gate_up, down = call.value("gate_up"), call.value("down")
    experts = static(gate_up, 0)
    call.want(experts <= _MOST_EXPERTS, f"{experts} experts, more than {_MOST_EXPERTS}")
    return _Experts(
        call,
        x,
        rows=x.type.shape[0],
        hidden=static(x, 1),
        ffn=static(down, 2),
        experts=experts,
        top_k=top_k,
        weigh_input=call.attributes["weigh_input"],
    )


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


def _activation(one: _Experts) -> dict[str, Any]:
    """Return the constants of the function that joins gate and up."""
    asked = one.call.attributes
    return {
        "ACTIVATION": asked["activation"],
        "LIMIT": float(asked["limit"]),
        "ALPHA": float(asked["alpha"]),
        "WEIGH": one.weigh_input,
        "X_STRIDE": one.x.strides[0],
    }


def _alone(one: _Experts, schedule: Schedule, here: Expr, hidden: Value, result: Value) -> None:
    """Add the two launches that take each choice alone. `here` is 1 for the steps that they are for, else 0."""
    call, itemsize = one.call, one.dtype.itemsize
    up = _chosen(one.problem(True, 1), row_tiles(one.hidden, itemsize, 0), schedule)
    down = _chosen(one.problem(False, 1), row_tiles(one.ffn, itemsize, one.top_k), schedule)
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
            **_activation(one),
            "BLOCK_N": up.block_n,
            "BLOCK_K": up.block_k,
            **loader,
            "DEPENDENT": schedule.dependent,
        },
        warps=up.warps,
        dependent=schedule.dependent,
    )
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
            "y": result,
        },
        {
            "TOP_K": one.top_k,
            "N": one.hidden,
            "K": one.ffn,
            "WEIGH": not one.weigh_input,
            "BLOCK_N": down.block_n,
            "BLOCK_K": down.block_k,
            **loader,
            "DEPENDENT": schedule.dependent,
        },
        warps=down.warps,
        dependent=schedule.dependent,
    )


def _group(one: _Experts, schedule: Schedule, here: Expr, most: int) -> tuple[Value, Value]:
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


def _blocks(
    one: _Experts,
    schedule: Schedule,
    block: int,
    here: Expr,
    order: Value,
    counts: Value,
    hidden: Value,
    made: Value,
) -> None:
    """Add the two launches that take blocks of `block` choices. `here` is 1 for the steps that they are for, else 0."""
    call = one.call
    few = block < 64  # weights are then read about once, and evicted first
    # Each expert with choices needs a block, and one more for each `block` choices after the first.
    some = least(one.choices, one.experts)
    blocks = plus(some, cdiv(minus(one.choices, some), block))
    itemsize = one.dtype.itemsize
    if schedule.bucket.batch_invariant:
        up, down = (invariant_tiles(depth, itemsize) for depth in (one.hidden, one.ffn))
    else:
        first, second = (
            group_tiles(problem.columns, problem.depth, problem.gated, block, itemsize, schedule.sm)
            for problem in (one.problem(True, block), one.problem(False, block))
        )
        up = _chosen(one.problem(True, block), first, schedule)
        down = _chosen(one.problem(False, block), second, schedule)
    shared = {
        "EXPERTS": one.experts,
        "TOKENS": block,
        "BLOCK_EXPERTS": power_of_two(one.experts),
        "EVICTION": "evict_first" if few else "",
        "DEPENDENT": schedule.dependent,
    }
    grouped = {"order": order, "counts": counts, "hidden": hidden, "blocks": blocks}
    gate_up, loader = one.weight("gate_up")
    schedule.launch(
        experts_up_tile,
        (times(times(here, blocks), -(-one.ffn // up.block_n)),),
        {
            "x": one.x,
            "weights": call.value("weights"),
            "gate_up": gate_up,
            "bias": call.optional("gate_up_bias"),
            **grouped,
        },
        {"TOP_K": one.top_k, "F": one.ffn, "K": one.hidden, **_activation(one), **shared, **_tiles(up), **loader},
        warps=up.warps,
        stages=up.stages,
        dependent=schedule.dependent,
    )
    down_weight, loader = one.weight("down")
    schedule.launch(
        experts_down_tile,
        (times(times(here, blocks), -(-one.hidden // down.block_n)),),
        {"down": down_weight, "bias": call.optional("down_bias"), "made": made, **grouped},
        {"N": one.hidden, "K": one.ffn, **shared, **_tiles(down), **loader},
        warps=down.warps,
        stages=down.stages,
        dependent=schedule.dependent,
    )


def _chosen(problem: ExpertsProblem, known: ChosenTiles, schedule: Schedule) -> ChosenTiles:
    """Return the tile sizes of a matmul: `known`, unless the schedule was given others."""
    return schedule.choose(EXPERTS, problem.fields(), type(known), lambda: (known, "heuristic"))


def _tiles(chosen: GroupTiles) -> dict[str, int]:
    return {"BLOCK_N": chosen.block_n, "BLOCK_K": chosen.block_k, "TOGETHER": chosen.together}


def _add(one: _Experts, schedule: Schedule, here: Expr, made: Value, result: Value) -> None:
    """Add the launch that adds the results of a token's choices. `here` is 1 for the steps that it is for, else 0."""
    block, warps = block_of(one.hidden)
    schedule.launch(
        add_choices,
        (times(here, one.rows), -(-one.hidden // block)),
        {"made": made, "weights": one.call.value("weights"), "y": result},
        {
            "TOP_K": one.top_k,
            "WIDTH": one.hidden,
            "WEIGH": not one.weigh_input,
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        dependent=schedule.dependent,
    )


LOWERINGS: Mapping[str, Lowering] = {"experts": lower_experts}
