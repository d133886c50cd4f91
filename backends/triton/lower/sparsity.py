"""Lowering of gaussian_top_k, an activation that keeps only the largest elements of a row."""

import triton

from ingot.backends.triton.kernels.sparsity import keep_above
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import as_rows, want_floats, want_narrow_rows, warps_of
from ingot.backends.triton.schedule import Schedule, Value


def _gaussian_top_k(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x = call.value("x")
    want_floats(call, "x")
    call.want_dense_rows("x")
    call.want(len(x.type.shape) == 2, f"x is {x.type}, not [T, F]")
    rows, result = as_rows(x.type), schedule.output(call.results[0])
    want_narrow_rows(call, rows)
    block = triton.next_power_of_2(rows.width)
    schedule.launch(
        keep_above,
        (rows.count,),
        {"x": x, "result": result},
        {
            "WIDTH": rows.width,
            "X_ROW": x.strides[0],
            "DEVIATIONS": call.attributes["deviations"],
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps_of(block),
        dependent=schedule.dependent,
    )
    return (result,)


LOWERINGS: dict[str, Lowering] = {"gaussian_top_k": _gaussian_top_k}
