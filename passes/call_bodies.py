"""Make a program of a single call, for backends that compile or time calls, and find the bounds of its dims."""

import operator
from typing import Any

from torch import fx

from ingot.ir import build
from ingot.ir.program import Program, StateSpec
from ingot.ir.types import Dim, StateType


def call_body(program: Program, node: fx.Node, name: str) -> Program:
    """Return a program named `name` that contains only the call `node`.

    Its inputs are named in0, in1 and so on. Its states, such as KV caches, are named state0, state1 and so on. Both are
    in the order of the call's arguments. A value that occurs twice among the arguments becomes two inputs.
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
    """Return the bounds of the symbolic dims that `body` uses, by name.

    Steps of the program's bucket class (a range of step sizes) keep these bounds, so compiled code may rely on them.
    """
    used = body.symbols()
    dims = {name: dim for name, dim in program.dims.items() if name in used}
    if program.bucket is None:
        return dims
    low, high = program.bucket.tokens
    for name in ("T", "B", "L", "G"):  # a sequence has at least one token, a token at most one row of logits
        if name in dims:
            dims[name] = Dim(name, low if name == "T" else 1, min(high, dims[name].hi))
    return dims
