"""Extract a part of a program as a program of its own."""

from collections.abc import Collection

from torch import fx

from ingot.ir.program import Program
from ingot.ir.types import StateType, TensorType


def around(program: Program, names: Collection[str], hops: int) -> set[fx.Node]:
    """Return the calls of a program near the nodes `names`.

    These are the nodes themselves, and the calls that are at most `hops` edges of the graph away.
    """
    chosen = {node for node in program.calls() if node.name in names}
    for _ in range(hops):
        near = {other for node in chosen for other in (*node.all_input_nodes, *node.users)}
        chosen |= {node for node in near if node.op == "call_function"}
    return chosen


def excerpt(program: Program, chosen: set[fx.Node], *, with_inputs: bool) -> Program:
    """Return a smaller program that consists of the `chosen` calls.

    The params and states that the calls read stay params and states. Any other value that they read becomes an input
    with the name of its node. A result becomes an output if a call outside reads it, or if no call reads it.

    Tuples and updated states cannot be inputs, so the calls that make them are added. With `with_inputs`, unused inputs
    and states of the program are kept too.
    """
    chosen = _closed(chosen)
    part = Program(program.name, program.stage, dict(program.dims), bucket=program.bucket)
    part.regions = {name: region for name, region in program.regions.items()}
    values: dict[fx.Node, fx.Node] = {}
    read = {source for node in chosen for source in node.all_input_nodes if source not in chosen}
    for node in program.graph.nodes:
        kind = node.meta.get("kind")
        if node not in read and not (with_inputs and kind in ("input", "state")):
            continue
        name = str(node.target) if node.op == "placeholder" else node.name
        if kind == "param":
            values[node] = part.add_param(name, program.params[name])
        elif kind == "state":
            values[node] = part.add_state(name, program.states[name])
        else:
            values[node] = part.add_input(name, node.meta["type"])
    for node in program.calls():
        if node in chosen:
            values[node] = part.graph.node_copy(node, values.__getitem__)
    outputs: dict[str, fx.Node] = {name: values[node] for name, node in _states(program, values).items()}
    named = {node: name for name, node in program.output_nodes().items()}
    for node in program.calls():
        is_read = any(user not in chosen for user in node.users) or not node.users
        if node in chosen and is_read and isinstance(node.meta["type"], TensorType):
            outputs[named.get(node, node.name)] = values[node]
    part.set_outputs(outputs)
    used = part.symbols()
    part.dims = {name: dim for name, dim in part.dims.items() if name in used or with_inputs}
    return part


def _closed(chosen: set[fx.Node]) -> set[fx.Node]:
    waiting, closed = list(chosen), set(chosen)
    while waiting:
        node = waiting.pop()
        needed = [
            source
            for source in node.all_input_nodes
            if source.op == "call_function" and not isinstance(source.meta["type"], TensorType)
        ]
        if not isinstance(node.meta["type"], TensorType | StateType):
            needed += list(node.users)  # include the nodes that take the items of a tuple
        for other in needed:
            if other.op == "call_function" and other not in closed:
                closed.add(other)
                waiting.append(other)
    return closed


def _states(program: Program, values: dict[fx.Node, fx.Node]) -> dict[str, fx.Node]:
    """Return a mapping from the name of each state in an excerpt to the node of its last update.

    An excerpt is a part of a program. `values` maps nodes of the whole program to nodes of the excerpt.
    """
    last: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if node in values and isinstance(node.meta.get("type"), StateType):
            last[node.meta["type"].name] = node
    return last
