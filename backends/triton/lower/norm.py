"""Lowerings of norms: rms_norm, layer_norm, add_rms_norm."""

import triton

from ingot.backends.triton.kernels.norm import norm
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import as_rows, strides_in, want_floats, want_narrow_rows, warps_of
from ingot.backends.triton.schedule import Schedule, Value

# Elements of a program's tile: as many groups (heads) of a row as fit, or one wider group.
_TILE = 2048


def _norm(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x, weight = call.value("x"), call.value("weight")
    residual, bias = call.optional("residual"), call.optional("bias")
    want_floats(call, "x", "weight", *(("residual",) if residual else ()))
    call.want_dense_rows("x", "weight", "residual", "bias")
    call.want(bias is None or bias.type == weight.type, "weight and bias differ in type")
    call.want(residual is None or residual.type.dtype == x.type.dtype, "x and residual differ in dtype")
    call.want(residual is None or residual.type.shape == x.type.shape, "x and residual differ in shape")
    rows = as_rows(x.type)
    want_narrow_rows(call, rows)
    block = triton.next_power_of_2(rows.width)
    groups = min(triton.next_power_of_2(rows.groups), max(1, _TILE // block))
    results = tuple(schedule.output(result) for result in call.results)
    row, group, _ = strides_in(x, x.type)
    residual_row, residual_group, _ = strides_in(residual, x.type) if residual else (0, 0, 0)
    schedule.launch(
        norm,
        (rows.count, cdiv(rows.groups, groups)),
        {
            "x": x,
            "residual": residual,
            "weight": weight,
            "bias": bias,
            "total": results[1] if residual else None,
            "result": results[0],
        },
        {
            "GROUPS": rows.groups,
            "WIDTH": rows.width,
            "X_ROW": row,
            "X_GROUP": group,
            "RESIDUAL_ROW": residual_row,
            "RESIDUAL_GROUP": residual_group,
            "WEIGHT_GROUP": strides_in(weight, x.type)[1],
            "EPS": call.attributes["eps"],
            "CENTRED": call.op == "layer_norm",
            "BLOCK_GROUPS": groups,
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps_of(groups * block),
        dependent=schedule.dependent,
    )
    return results


LOWERINGS: dict[str, Lowering] = {"rms_norm": _norm, "layer_norm": _norm, "add_rms_norm": _norm}
