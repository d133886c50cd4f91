"""Lowerings of ops on several residual streams per token: mix, concat, match_rms."""

import triton

from ingot.backends.triton.kernels.streams import join, match_size, mix_streams
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import as_rows, block_of, strides_in, want_floats, want_narrow_rows, warps_of
from ingot.backends.triton.schedule import Schedule, Value


def _mix(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x, weights, (target,) = call.value("x"), call.value("weights"), call.results
    want_floats(call, "x", "weights")
    call.want_dense_rows("x")
    rows, result = as_rows(target), schedule.output(target)
    block, warps = block_of(rows.width)
    schedule.launch(
        mix_streams,
        (rows.count, rows.groups, cdiv(rows.width, block)),
        {"x": x, "weights": weights, "result": result},
        {
            "STREAMS": as_rows(x.type).groups,
            "MIXED": rows.groups,
            "WIDTH": rows.width,
            "X_ROW": x.strides[0],
            "X_STREAM": x.strides[1],
            **dict(zip(("WEIGHT_ROW", "WEIGHT_MIXED", "WEIGHT_STREAM"), weights.strides, strict=True)),
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        dependent=schedule.dependent,
    )
    return (result,)


def _concat(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x, y, (target,) = call.value("x"), call.value("y"), call.results
    want_floats(call, "x", "y")
    call.want(x.type.dtype == y.type.dtype, "x and y differ in dtype")
    rows, left, result = as_rows(target), as_rows(x.type), schedule.output(target)
    block, warps = block_of(rows.width)
    names = ("ROW", "GROUP", "COLUMN")
    schedule.launch(
        join,
        (rows.count, rows.groups, cdiv(rows.width, block)),
        {"x": x, "y": y, "result": result},
        {
            "GROUPS": rows.groups,
            "WIDTH": rows.width,
            "X_GROUPS": left.groups,
            "X_WIDTH": left.width,
            **{f"X_{name}": step for name, step in zip(names, strides_in(x, x.type), strict=True)},
            **{f"Y_{name}": step for name, step in zip(names, strides_in(y, y.type), strict=True)},
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        dependent=schedule.dependent,
    )
    return (result,)


def _match_rms(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x, like = call.value("x"), call.value("like")
    want_floats(call, "x", "like")
    call.want_dense_rows("x", "like")
    rows, result = as_rows(x.type), schedule.output(call.results[0])
    want_narrow_rows(call, rows)
    row, group, _ = strides_in(x, x.type)
    like_row, like_group, _ = strides_in(like, x.type)
    block = triton.next_power_of_2(rows.width)
    schedule.launch(
        match_size,
        (rows.count, rows.groups),
        {"x": x, "like": like, "result": result},
        {
            "GROUPS": rows.groups,
            "WIDTH": rows.width,
            "X_ROW": row,
            "X_GROUP": group,
            "LIKE_ROW": like_row,
            "LIKE_GROUP": like_group,
            "LEAST": call.attributes["least"],
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps_of(block),
        dependent=schedule.dependent,
    )
    return (result,)


LOWERINGS: dict[str, Lowering] = {"mix": _mix, "concat": _concat, "match_rms": _match_rms}
