"""Lowering of `pool`: one launch sums the vectors, and a second one scales them to length 1."""

from collections.abc import Mapping

from ingot.backends.triton.kernels.pool import pool_rows, unit_rows
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.attention.heads import static
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import block_of, want_floats
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.ops.pool import LEAST_NORM

# Columns and tokens of a program's tile: each of 128 threads sums 16 elements per iteration.
_COLUMNS, _TOKENS = 64, 32


def _pool(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    want_floats(call, "x")
    call.want_dense_rows(*call.values)
    x, out = call.value("x"), schedule.output(call.results[0])
    width, sequences = static(x, 1), call.value("q_starts").type.shape[0]
    names = ("x", "q_starts", "q_lens", "dimensions")
    schedule.launch(
        pool_rows,
        (sequences, cdiv(width, _COLUMNS)),
        {**{name: call.value(name) for name in names}, "out": out},
        {
            "X_TOKEN": x.strides[0],
            "WIDTH": width,
            "POOLING": call.attributes["pooling"],
            "TOKENS": _TOKENS if call.attributes["pooling"] == "mean" else 1,
            "BLOCK": _COLUMNS,
            "DEPENDENT": schedule.dependent,
        },
        dependent=schedule.dependent,
    )
    block, warps = block_of(width)
    schedule.launch(
        unit_rows,
        (sequences,),
        {"out": out, "normalize": call.value("normalize")},
        {"WIDTH": width, "LEAST": LEAST_NORM, "BLOCK": block, "DEPENDENT": schedule.dependent},
        warps=warps,
        dependent=schedule.dependent,
    )
    return (out,)


LOWERINGS: Mapping[str, Lowering] = {"pool": _pool}
