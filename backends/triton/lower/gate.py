"""Lowerings of the gates and activations of an MLP: silu_mul, gelu_mul, activate."""

from ingot.backends.triton.kernels.gate import gate_mul
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import as_rows, block_of, want_floats
from ingot.backends.triton.schedule import Schedule, Value

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _gate(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x, up = call.value("gate"), call.value("up")
    want_floats(call, "gate", "up")
    call.want_dense_rows("gate", "up")
    call.want(
        x.type.shape == up.type.shape and len(x.type.shape) == 2,
        f"gate and up are not both [T, F]: {x.type}, {up.type}",
    )
    activation = "silu" if call.op == "silu_mul" else _GELU[call.attributes["approximate"]]
    return _launch(call, schedule, x, up, activation)


def _activate(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x = call.value("x")
    want_floats(call, "x")
    call.want_dense_rows("x")
    call.want(len(x.type.shape) == 2, f"x is {x.type}, not [T, F]")
    return _launch(call, schedule, x, None, call.attributes["kind"])


def _launch(call: Call, schedule: Schedule, x: Value, up: Value | None, activation: str) -> tuple[Value, ...]:
    rows, (result,) = as_rows(x.type), (schedule.output(call.results[0]),)
    block, warps = block_of(rows.width)
    schedule.launch(
        gate_mul,
        (rows.count, cdiv(rows.width, block)),
        {"gate": x, "up": up, "result": result},
        {
            "WIDTH": rows.width,
            "GATE_ROW": x.strides[0],
            "UP_ROW": 0 if up is None else up.strides[0],
            "ACTIVATION": activation,
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        dependent=schedule.dependent,
    )
    return (result,)


LOWERINGS: dict[str, Lowering] = {"silu_mul": _gate, "gelu_mul": _gate, "activate": _activate}
