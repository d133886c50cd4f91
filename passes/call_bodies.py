"""Make programs of a single call or of a region, for backends that compile or time them, and bound their dims."""

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


def region_body(program: Program, members: list[fx.Node], name: str) -> tuple[Program, list[fx.Node], list[fx.Node]]:
    """Return the program of a region with the calls `members`, its inputs and its outputs.

    Inputs are the nodes outside that the region reads. Outputs are the nodes of the region that are read outside.
    """
    inside = set(members)
    inputs: list[fx.Node] = []
    for node in members:
        inputs += [source for source in node.all_input_nodes if source not in inside and source not in inputs]
    outputs = [node for node in members if any(user not in inside for user in node.users)]
    body = Program(name, program.stage, {}, bucket=program.bucket)
    values: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(inputs):
        values[node] = body.add_input(f"in{index}", node.meta["type"])
    for node in members:
        values[node] = body.graph.node_copy(node, values.__getitem__)
        for key in ("backend", "placement"):  # properties of the call, not of the computation
            values[node].meta.pop(key, None)
    body.set_outputs({f"out{index}": values[node] for index, node in enumerate(outputs)})
    used = body.symbols()
    body.dims = {name: dim for name, dim in program.dims.items() if name in used}
    return body, inputs, outputs


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
    if "T_tp" in dims:
        ranks = program.mesh["tp"]
        dims["T_tp"] = Dim("T_tp", -(-low // ranks), min(-(-high // ranks), dims["T_tp"].hi))
    return dims
