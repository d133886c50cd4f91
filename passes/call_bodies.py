"""Bodies for backends that compile for types: a single call as a program of its own, and the sizes it is made for."""

import operator
from typing import Any

from torch import fx

from ingot.ir import build
from ingot.ir.program import Program, StateSpec
from ingot.ir.types import Dim, StateType


def call_body(program: Program, node: fx.Node, name: str) -> Program:
    """The call `node` with its tensors as inputs in0, in1, … and states state0, …, in the order of its arguments.

    A value that stands twice among them is two inputs: callers pass a tensor for each place.
    """
    body = Program(name, program.stage, {}, bucket=program.bucket)
    counts = {"in": 0, "state": 0}

    def placeholder(source: fx.Node) -> fx.Node:
        value_type = source.meta["type"]
        kind = "state" if isinstance(value_type, StateType) else "in"
        given = f"{kind}{counts[kind]}"
        counts[kind] += 1
        if isinstance(value_type, StateType):
            spec = program.states[value_type.name]
            return body.add_state(given, StateSpec(spec.kind, spec.group, spec.unit, spec.type))
        return body.add_input(given, value_type)

    args: Any = fx.node.map_arg(node.args, placeholder)
    call = build.call(body, node.target, args, dict(node.kwargs))
    items = getattr(call.meta["type"], "items", None)
    results = (
        [call] if items is None else [build.call(body, operator.getitem, (call, i), {}) for i in range(len(items))]
    )
    outputs: dict[str, fx.Node] = {str(state.target): state for state in body.placeholders("state")}
    for index, result in enumerate(results):
        value_type = result.meta["type"]
        outputs[value_type.name if isinstance(value_type, StateType) else f"out{index}"] = result
    body.set_outputs(outputs)
    body.dims = serving_dims(program, body)
    return body


def serving_dims(program: Program, body: Program) -> dict[str, Dim]:
    """The dims of `body` for the steps of the program's bucket class, which what is compiled for it may rely on."""
    used = body.symbols()
    dims = {name: dim for name, dim in program.dims.items() if name in used}
    if program.bucket is None:
        return dims
    low, high = program.bucket.tokens
    for name in ("T", "B", "L", "G"):  # a sequence feeds a token at least, and a token has a row of logits at most
        if name in dims:
            dims[name] = Dim(name, low if name == "T" else 1, min(high, dims[name].hi))
    return dims
