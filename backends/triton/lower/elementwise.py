"""Lowerings of elementwise ops: aten add and mul, soft_cap, clamp, cast, scale_by_position."""

from collections.abc import Mapping
from typing import Any

from ingot.backends.triton.kernels.elementwise import arithmetic, convert, scale_by_position
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import as_rows, block_of, strides_in, want_floats
from ingot.backends.triton.schedule import Schedule, Value


def _arithmetic(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    """Add the launch for aten's add or mul to `schedule`, of a tensor and a number or another tensor.

    The second tensor is broadcast. Its factor, the attribute `alpha`, must be 1.
    """
    x, other, (target,) = call.value("x"), call.optional("other"), call.results
    want_floats(call, "x", *(("other",) if other else ()))
    alpha = call.attributes.get("alpha", 1)
    call.want(other is None or alpha == 1, f"alpha is {alpha}")
    rows, result = as_rows(target), schedule.output(target)
    block, warps = block_of(rows.width)
    names = ("ROW", "GROUP", "COLUMN")
    strides = strides_in(other, target) if other else (0, 0, 0)
    schedule.launch(
        arithmetic,
        (rows.count, rows.groups, cdiv(rows.width, block)),
        {"x": x, "other": other, "result": result},
        {
            "GROUPS": rows.groups,
            "WIDTH": rows.width,
            **{f"X_{name}": step for name, step in zip(names, strides_in(x, target), strict=True)},
            **{f"OTHER_{name}": step for name, step in zip(names, strides, strict=True)},
            "NUMBER": None if other else float(call.attributes["other"] * alpha),
            "MULTIPLY": call.op == "aten.mul.Tensor",
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        dependent=schedule.dependent,
    )
    return (result,)


def _convert(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    limits = {"CAP": call.attributes.get("cap"), "LIMIT": call.attributes.get("limit")}
    return _one_input(call, schedule, convert, {}, limits)


def _scale_by_position(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    names = ("period", "strength", "shift")
    constants = {name.upper(): call.attributes[name] for name in names}
    positions = call.value("positions")
    call.want(positions.strides == (1,), f"strided positions: {positions.type}")
    return _one_input(call, schedule, scale_by_position, {"positions": positions}, constants)


def _one_input(
    call: Call, schedule: Schedule, kernel: Any, more: Mapping[str, Value], constants: Mapping[str, Any]
) -> tuple[Value, ...]:
    """Add the launch of a kernel that computes every element of the result from the same element of `x`.

    `more` are its further inputs, and `constants` its constants beyond sizes and strides.
    """
    x, (target,) = call.value("x"), call.results
    want_floats(call, "x")
    rows, result = as_rows(target), schedule.output(target)
    block, warps = block_of(rows.width)
    row, group, column = strides_in(x, target)
    schedule.launch(
        kernel,
        (rows.count, rows.groups, cdiv(rows.width, block)),
        {"x": x, **more, "result": result},
        {
            "GROUPS": rows.groups,
            "WIDTH": rows.width,
            "X_ROW": row,
            "X_GROUP": group,
            "X_COLUMN": column,
            **constants,
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        dependent=schedule.dependent,
    )
    return (result,)


LOWERINGS: dict[str, Lowering] = {
    "aten.add.Tensor": _arithmetic,
    "aten.mul.Tensor": _arithmetic,
    "soft_cap": _convert,
    "clamp": _convert,
    "cast": _convert,
    "scale_by_position": _scale_by_position,
}
