"""make-plan: turns the program into instructions, with the lifetime of every value and in-place state updates."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir.artifact.plan import Argument, BucketPlan, DType, Executable, Instruction, Plan, Ref, State, Value
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import PassError
from ingot.ir.granule import granule_of
from ingot.ir.program import Program, RegionCall, names_in_plan, states_written, target_name
from ingot.ir.types import DTYPE_NAMES, StateType, TensorType
from ingot.passes.base import Pass, PassContext
from ingot.passes.insert_ending import InsertEnding
from ingot.passes.plan_memory import bucket_memory, region_workspaces, resident_memory
from ingot.passes.rewrite import Rewriter
from ingot.passes.stage_plans import stage_plans
from ingot.passes.storages import Storage, storages


@dataclass(frozen=True)
class MakePlan(Pass):
    name: ClassVar[str] = "make-plan"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        assert program.bucket is not None
        if not rewriter.take(program.graph.output_node()):
            return
        nodes = [node for node in program.calls() if node.target is not operator.getitem]
        instructions, values = _instructions(program, nodes)
        workspaces = region_workspaces(program, context)
        memory = bucket_memory(program, nodes, instructions, values, workspaces, context)
        executables = [
            _executable(program, name).model_copy(update={"workspace": workspaces[name]})
            for name in (*program.regions, *program.compiled)
        ]
        program.plan = Plan(
            entry=program.name,
            ending=str(program.ending),
            granule=granule_of(program),
            dims={dim.name: (dim.lo, dim.hi) for dim in program.dims.values()},
            inputs={name: str(value_type) for name, value_type in program.input_types().items()},
            params={name: str(spec.type) for name, spec in program.params.items()},
            states={
                name: State(kind=spec.kind, group=spec.group, unit=spec.unit, type=str(spec.type))
                for name, spec in program.states.items()
            },
            outputs={
                name: str(node.meta["type"])
                for name, node in program.output_nodes().items()
                if not isinstance(node.meta["type"], StateType)
            },
            executables={executable.id: executable for executable in executables},
            libraries=dict(sorted(program.libraries.items())),
            memory=resident_memory(program, memory.sizes),
            buckets=(
                BucketPlan(
                    bucket=program.bucket,
                    instructions=instructions,
                    values=values,
                    memory=memory,
                    ending=_ending(nodes),
                ),
            ),
        )
        if context.first_layers:
            program.stages = stage_plans(program, program.plan, nodes, _names(program), workspaces, context)


def _ending(nodes: Sequence[fx.Node]) -> int:
    """Return the index of the first instruction after the model's own, such as sampling.

    `nodes` are the calls of all instructions, in order.
    """
    own = [number for number, node in enumerate(nodes) if node.meta.get("origin") != InsertEnding.name]
    return own[-1] + 1 if own else 0


def _executable(program: Program, region: str) -> Executable:
    executable = {**program.regions, **program.compiled}[region].executable
    if executable is None:
        raise PassError(f"region '{region}' has no executable", expected="emit-executables before make-plan")
    return executable


def _instructions(program: Program, nodes: Sequence[fx.Node]) -> tuple[tuple[Instruction, ...], dict[str, Value]]:
    """Return the instructions for the calls `nodes`, in order, and the program's values: name -> type and storage.

    A getitem node is no instruction. It becomes a named result of the call that returns the tuple. A value has the name
    of its node. All versions of a state have the state's name, because it is updated in place.
    """
    named = _names(program)
    last_use = _last_uses(program)
    instructions: list[Instruction] = []
    values: dict[str, Value] = {}
    memory = storages(program)
    for node in nodes:
        results, updates = _results(node, named)
        for result in _result_nodes(node):
            if isinstance(result.meta["type"], TensorType):
                values[named[result]] = _value(result, memory[result], named)
        if isinstance(node.target, RegionCall):
            target = f"exe.{_executable(program, node.target.name).id}"
        else:
            target = target_name(node.target)
        instructions.append(
            Instruction(
                target=target,
                backend=node.meta["backend"],
                args=tuple(_argument(value, named) for value in node.args),
                kwargs={name: _argument(value, named) for name, value in node.kwargs.items()},
                results=results,
                updates=updates,
                frees=tuple(named[value] for value in last_use.get(node, ())),
                executable=_executable(program, node.meta["compiled"]).id if "compiled" in node.meta else None,
            )
        )
    return tuple(instructions), values


def _value(node: fx.Node, storage: Storage, named: dict[fx.Node, str]) -> Value:
    value_type = str(node.meta["type"])
    if storage.holder is not node:
        return Value(type=value_type, buffer="view", of=named[storage.holder])
    filled = str(storage.type)
    return Value(type=value_type, buffer="pool", storage=None if filled == value_type else filled)


def _names(program: Program) -> dict[fx.Node, str]:
    """Return the name of each value (`names_in_plan`). Raises PassError if two outputs are one value."""
    returned: dict[fx.Node, str] = {}
    for name, node in program.output_nodes().items():
        if isinstance(node.meta["type"], StateType):
            continue
        if node.op == "placeholder" or node in returned:
            other = f"output '{returned[node]}'" if node in returned else f"'{node.target}'"
            raise PassError(f"output '{name}' is the same value as {other}", expected="a value of its own")
        returned[node] = name
    return names_in_plan(program)


def _result_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of a call's results.

    For a call that returns a tuple, they are the getitem nodes that take its items, in order. For any other call, it is
    the call itself.
    """
    taken = [user for user in node.users if user.target is operator.getitem]
    return sorted(taken, key=lambda user: int(str(user.args[1]))) if taken else [node]


def _results(node: fx.Node, named: dict[fx.Node, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a call's results, in order, and the names of the states that it updates.

    A result that nothing reads is named "". `named` maps nodes to their names in the plan.
    """
    items = getattr(node.meta["type"], "items", None)
    updates = tuple(named[version] for version in states_written(node))
    if items is None:
        return ((), updates) if updates else ((named[node],), ())
    taken = {int(str(user.args[1])): named[user] for user in node.users if user.target is operator.getitem}
    count = len(items) - len(updates)  # states come last, and are updated in place
    return tuple(taken.get(index, "") for index in range(count)), updates


def _last_uses(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Return for each call the values that it is the last to read.

    The executor drops its references to them after the call. The memory of a value stays while a view of it exists.
    """
    last: dict[fx.Node, fx.Node] = {}
    kept = set(program.output_nodes().values())
    for node in program.calls():
        if node.target is operator.getitem:
            continue
        for source in node.all_input_nodes:
            if source.op == "call_function" and source not in kept and isinstance(source.meta["type"], TensorType):
                last[source] = node
    frees: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        frees.setdefault(user, []).append(value)
    return frees


def _argument(value: Any, named: dict[fx.Node, str]) -> Argument:
    if isinstance(value, fx.Node):
        return Ref(ref=named[value])
    if isinstance(value, torch.dtype):
        return DType(dtype=DTYPE_NAMES[value])
    if isinstance(value, list | tuple):
        return tuple(value)
    assert value is None or isinstance(value, bool | int | float | str)
    return value
