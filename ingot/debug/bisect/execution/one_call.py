"""Extract one call of a program as a program of its own, to compute, print and run it alone."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ingot.debug.bisect.execution.tensor_check import Wrong, check_state, check_tensor, raw_bits, same_bits
from ingot.ir.interpret import interpret
from ingot.ir.numerics.tolerances import TOLERANCES
from ingot.ir.program import Program, RegionCall
from ingot.ir.types import StateType, TensorType, TupleType


def instruction_nodes(program: Program) -> list[fx.Node]:
    """Return the calls of a program that are instructions of its plan, in order. Nodes that only take an item of a
    tuple (getitem) are no instructions."""
    return [node for node in program.calls() if node.target is not operator.getitem]


def value_names(program: Program) -> dict[fx.Node, str]:
    """Return the name that each node's value has in the plan. A placeholder, output or state has its own name; any
    other value has the name of its node."""
    names: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
        elif node.op == "call_function":
            names[node] = node.meta["type"].name if isinstance(node.meta["type"], StateType) else node.name
    outputs = program.output_nodes()
    return names | {node: name for name, node in outputs.items() if not isinstance(node.meta["type"], StateType)}


def result_names(node: fx.Node, names: Mapping[fx.Node, str]) -> tuple[str, ...]:
    """Return the plan names of the results of a call, updated states last. A result that nothing reads is named "".
    `names` has the plan names of nodes."""
    value_type = node.meta["type"]
    if not isinstance(value_type, TupleType):
        return (names[node],)
    taken = {int(str(user.args[1])): names[user] for user in node.users if user.target is operator.getitem}
    return tuple(
        item.name if isinstance(item, StateType) else taken.get(index, "")
        for index, item in enumerate(value_type.items)
    )


def one_call(program: Program, node: fx.Node, names: Mapping[fx.Node, str]) -> Program:
    """Return a program that holds only the call `node` of `program`. Its inputs, states and outputs have the plan names
    in `names`. A result that nothing reads is named after its index in the call's tuple, such as "unused0"."""
    alone = Program(program.name, program.stage, {}, bucket=program.bucket)
    values: dict[fx.Node, fx.Node] = {}
    made: dict[str, fx.Node] = {}
    for source in node.all_input_nodes:
        name, value_type = names[source], source.meta["type"]
        if name not in made:
            if isinstance(value_type, StateType):
                made[name] = alone.add_state(name, program.states[name])
            else:
                made[name] = alone.add_input(name, value_type)
        values[source] = made[name]
    if isinstance(node.target, RegionCall):
        alone.regions = {node.target.name: program.regions[node.target.name]}
    call = alone.graph.node_copy(node, values.__getitem__)
    results = result_names(node, names)
    outputs = {results[0]: call}
    if isinstance(node.meta["type"], TupleType):
        outputs = {}
        for index, (name, item) in enumerate(zip(results, node.meta["type"].items, strict=True)):
            taken = alone.graph.call_function(operator.getitem, (call, index))
            taken.meta.update(type=item, origin=node.meta.get("origin", ""))
            outputs[name or f"unused{index}"] = taken
    alone.set_outputs(outputs)
    used = alone.symbols()
    alone.dims = {name: dim for name, dim in program.dims.items() if name in used}
    return alone


def meaning(alone: Program, values: Mapping[str, Any], *, exact: bool) -> tuple[torch.Tensor, ...]:
    """Compute a one-call program by the op's reference; a region's call is computed by interpreting its body. `values`
    has the inputs and states by name. Return the results, updated states last. With `exact`, compute in float64."""
    return tuple(interpret(alone, values, exact=exact).values())


def wrong_results(
    alone: Program,
    inputs: Mapping[str, torch.Tensor],
    results: Sequence[torch.Tensor],
    updated: Mapping[str, torch.Tensor],
) -> tuple[str, Wrong] | None:
    """Check the results of one call, and the states that it updated, against the op's reference. Return the name of the
    first wrong tensor and what is wrong; None if all are right.

    `alone` is a program of only this call. `inputs` has its inputs, and its states from before the call, by name.
    `updated` has the states after the call.
    """
    plain = meaning(alone, inputs, exact=False)
    count = len(results)
    fine = [_is_fine(value, wanted) for value, wanted in zip(results, plain, strict=False)]
    fine += [
        _is_fine(state, wanted, inputs[name])
        for (name, state), wanted in zip(updated.items(), plain[count:], strict=True)
    ]
    if all(fine):
        return None  # the float64 run, which doubles the cost, is not needed
    exact = meaning(alone, inputs, exact=True)
    call = next(iter(alone.calls()))
    dtype = coarsest(alone.regions[call.target.name].body) if isinstance(call.target, RegionCall) else None
    for name, value, p, e in zip(alone.outputs, results, plain, exact, strict=False):
        if wrong := check_tensor(value, p, e, dtype):
            return name, wrong
    for (name, value), p, e in zip(updated.items(), plain[count:], exact[count:], strict=True):
        if wrong := check_state(value, inputs[name], p, e):
            return name, wrong
    return None


def _is_fine(value: torch.Tensor, plain: torch.Tensor, before: torch.Tensor | None = None) -> bool:
    """Return whether a result is certainly right: its bits equal the reference's (`plain`) and it is finite. Otherwise
    a comparison with float64 must decide, since infinities may be an overflow.

    For a state, `before` is its content before the call; then only changed elements must be finite.
    """
    if value.shape != plain.shape or value.dtype is not plain.dtype or not same_bits(value, plain):
        return False
    if not plain.is_floating_point():
        return True
    finite = plain.isfinite() if before is None else plain.isfinite() | (raw_bits(plain) == raw_bits(before))
    return bool(finite.all())


def coarsest(body: Program) -> torch.dtype | None:
    """Return the floating-point dtype of lowest precision among the values of a region's body. Only dtypes with a
    tolerance in TOLERANCES count; None if there are none."""
    types = [node.meta["type"] for node in body.graph.nodes if node.op != "output"]
    dtypes = {item.dtype for item in types if isinstance(item, TensorType)} & TOLERANCES.keys()
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
