"""Extract one call of a program as a program of its own, to compute, print and run it alone."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ingot.debug.bisect.execution.tensor_check import Wrong, check_state, check_tensor, raw_bits, same_bits
from ingot.ir.cache.exact import comparable_state
from ingot.ir.interpret import interpret
from ingot.ir.numerics.tolerances import TOLERANCES
from ingot.ir.program import Program, RegionCall
from ingot.ir.types import StateType, TensorType, TupleType


def instruction_nodes(program: Program) -> list[fx.Node]:
    """Return the calls of a program that become instructions of its plan, in order.

    Nodes that only take an item of a tuple (getitem) do not become instructions.
    """
    return [node for node in program.calls() if node.target is not operator.getitem]


def value_names(program: Program) -> dict[fx.Node, str]:
    """Return a mapping from nodes to the names of their values in the plan.

    Inputs, weights, states and outputs keep their names. Any other value has the name of its node.
    """
    names: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
        elif node.op == "call_function":
            names[node] = node.meta["type"].name if isinstance(node.meta["type"], StateType) else node.name
    outputs = program.output_nodes()
    return names | {node: name for name, node in outputs.items() if not isinstance(node.meta["type"], StateType)}


def result_names(node: fx.Node, names: Mapping[fx.Node, str]) -> tuple[str, ...]:
    """Return the names of a call's results in the plan, updated states last.

    A result that nothing reads has the name "". `names` maps nodes to their names in the plan.
    """
    value_type = node.meta["type"]
    if not isinstance(value_type, TupleType):
        return (names[node],)
    taken = {int(str(user.args[1])): names[user] for user in node.users if user.target is operator.getitem}
    return tuple(
        item.name if isinstance(item, StateType) else taken.get(index, "")
        for index, item in enumerate(value_type.items)
    )


def one_call(program: Program, node: fx.Node, names: Mapping[fx.Node, str]) -> Program:
    """Return a program that holds only the call `node` of `program`.

    `names` maps nodes to their names in the plan. The inputs, states and outputs of the new program have these names. A
    result that nothing reads gets a name with its index in the call's tuple, such as "unused0".
    """
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
    """Compute a program of one call by the op's reference implementation. Return the results, updated states last.

    If the call is a region, the region's body is interpreted. `values` maps names to the inputs and states. With
    `exact`, compute in float64.
    """
    return tuple(interpret(alone, values, exact=exact).values())


def wrong_results(
    alone: Program,
    inputs: Mapping[str, torch.Tensor],
    results: Sequence[torch.Tensor],
    updated: Mapping[str, torch.Tensor],
) -> tuple[str, Wrong] | None:
    """Compare the results and updated states of one call with the op's reference. Return the first wrong tensor; None
    if all are right.

    `alone` is a program that holds only this call. `inputs` maps names to its inputs, and to its states before the
    call. `updated` maps names to the states after the call. The result is a pair: the tensor's name and what is wrong.
    """
    plain = meaning(alone, inputs, exact=False)
    count = len(results)
    fine = [_is_fine(value, wanted) for value, wanted in zip(results, plain, strict=False)]
    states = [
        _State(name, *(comparable_state(alone, name, one) for one in (inputs[name], state, wanted)))
        for (name, state), wanted in zip(updated.items(), plain[count:], strict=True)
    ]
    fine += [_is_fine(state.found, state.plain, state.before) for state in states]
    if all(fine):
        return None  # the float64 run, which doubles the cost, is not needed
    exact = meaning(alone, inputs, exact=True)
    call = next(iter(alone.calls()))
    dtype = coarsest(alone.regions[call.target.name].body) if isinstance(call.target, RegionCall) else None
    for name, value, p, e in zip(alone.outputs, results, plain, exact, strict=False):
        if wrong := check_tensor(value, p, e, dtype):
            return name, wrong
    for state, e in zip(states, exact[count:], strict=True):
        if wrong := check_state(state.found, state.before, state.plain, e):
            return state.name, wrong
    return None


@dataclass(frozen=True)
class _State:
    """A state before a call, after it, and after the op's reference."""

    name: str
    before: torch.Tensor
    found: torch.Tensor
    plain: torch.Tensor


def _is_fine(value: torch.Tensor, plain: torch.Tensor, before: torch.Tensor | None = None) -> bool:
    """Return whether a result is certainly right: finite, with the same bits as the reference's result `plain`.

    If it is not, a comparison with float64 must decide. Infinities may be an overflow, even if the reference has them
    too.

    For a state, `before` is its content before the call. Then only changed elements must be finite.
    """
    if value.shape != plain.shape or value.dtype is not plain.dtype or not same_bits(value, plain):
        return False
    if not plain.is_floating_point():
        return True
    finite = plain.isfinite() if before is None else plain.isfinite() | (raw_bits(plain) == raw_bits(before))
    return bool(finite.all())


def coarsest(body: Program) -> torch.dtype | None:
    """Return the floating-point dtype of lowest precision among the values of a region's body.

    Only dtypes with a tolerance in TOLERANCES count. Return None if no value has such a dtype.
    """
    types = [node.meta["type"] for node in body.graph.nodes if node.op != "output"]
    dtypes = {item.dtype for item in types if isinstance(item, TensorType)} & TOLERANCES.keys()
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
