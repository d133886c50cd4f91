"""Check that a plan matches its programs: compare every instruction with its call.

This does not share code with the pass that makes plans. It checks the call of each instruction, its values, and how
long each value is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ingot.debug.bisect.execution.one_call import instruction_nodes, result_names, value_names
from ingot.ir.artifact.plan import Argument, BucketPlan, DType, Instruction, Plan, Ref
from ingot.ir.ops import op_of
from ingot.ir.outputs import may_stand_for
from ingot.ir.parse import parse_type
from ingot.ir.program import VIEWS, Program, RegionCall, target_name
from ingot.ir.types import DTYPES, StateType, TensorType


@dataclass(frozen=True)
class PlanFault:
    """A difference between an artifact's plan and the program that the plan was made from.

    `number` is the index of the wrong instruction, and `node` its call. Both are None if no single instruction is
    wrong. `tensor` names the wrong value, "" if there is none.
    """

    entry: str
    bucket: str | None
    text: str
    number: int | None = None
    node: fx.Node | None = None
    tensor: str = ""


def plan_fault(plan: Plan, programs: Mapping[str, Program], keys: Mapping[str, Mapping[str, str]]) -> PlanFault | None:
    """Compare a plan, the instructions of an artifact, with its programs. Return the first difference; None if there is
    none.

    `programs` maps bucket classes (ranges of step sizes) to programs. `keys` maps a bucket class and then a region name
    to the expected id of the region's executable. Regions with unknown ids are left out.
    """
    if (unlike := {bucket.bucket.name for bucket in plan.buckets} ^ programs.keys()) != set():
        return PlanFault(plan.entry, None, f"the bucket class {min(unlike)} is in the plan or in the program alone")
    for bucket in plan.buckets:
        program = programs[bucket.bucket.name]
        if bucket.bucket != program.bucket:
            return PlanFault(plan.entry, bucket.bucket.name, f"the bucket class is {bucket.bucket}")
        for fault in _faults(plan, bucket, program, keys.get(bucket.bucket.name, {})):
            return fault
    return None


def _faults(plan: Plan, bucket: BucketPlan, program: Program, keys: Mapping[str, str]) -> Iterator[PlanFault]:
    names, nodes = value_names(program), instruction_nodes(program)
    where = plan.entry, bucket.bucket.name
    for kind, found, wanted in _declared(plan, program):
        for name in wanted:
            if found.get(name) != wanted[name] and not (
                kind == "output" and _fits(name, found.get(name), wanted[name])
            ):
                yield PlanFault(
                    *where, f"the {kind} '{name}' is {found.get(name)}, expected {wanted[name]}", tensor=name
                )
    called: dict[str, str] = dict(keys)
    for number, (instruction, node) in enumerate(zip(bucket.instructions, nodes, strict=False)):
        for text, tensor in _differences(instruction, node, names, called):
            yield PlanFault(*where, text, number, node, tensor)
    if len(bucket.instructions) != len(nodes):
        text = f"it has {len(bucket.instructions)} instructions, expected {len(nodes)}"
        yield PlanFault(*where, text)
    for node in program.calls():
        if isinstance(node.meta["type"], TensorType) and (value := bucket.values.get(names[node])):
            number = _number(node, nodes)
            if value.type != str(node.meta["type"]):
                text = f"the value '{names[node]}' is {value.type}, expected {node.meta['type']}"
                yield PlanFault(*where, text, number, node, names[node])
    yield from _lives(bucket, nodes, names, program, where)


def _fits(output: str, declared: str | None, given: str) -> bool:
    """Return whether an output's type in the plan, `declared`, covers its type in one bucket class, `given`.

    Both types are texts. `declared` is None if the plan lacks the output; then return False.
    """
    return declared is not None and may_stand_for(parse_type(given), parse_type(declared), output)


def _declared(plan: Plan, program: Program) -> Iterator[tuple[str, Mapping[str, str], dict[str, str]]]:
    outputs = {name: node.meta["type"] for name, node in program.output_nodes().items()}
    yield "input", plan.inputs, {name: str(one) for name, one in program.input_types().items()}
    yield "weight", plan.params, {name: str(spec.type) for name, spec in program.params.items()}
    states = {name: f"{state.kind} {state.type} {state.group} {state.unit}" for name, state in plan.states.items()}
    yield "state", states, {n: f"{s.kind} {s.type} {s.group} {s.unit}" for n, s in program.states.items()}
    yield "output", plan.outputs, {n: str(one) for n, one in outputs.items() if not isinstance(one, StateType)}


def _differences(
    found: Instruction, node: fx.Node, names: Mapping[fx.Node, str], called: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Compare an instruction, `found`, with its call `node`. Yield each difference as a pair: a description, and the
    name of the wrong value or "".

    `names` maps nodes to their names in the plan. `called` maps region names to the ids of their executables. If it
    lacks the called region, the instruction's id is added. Later calls of this region must then use the same id.
    """
    if isinstance(node.target, RegionCall):
        region = node.target.name
        key = called.setdefault(region, found.target.removeprefix("exe."))
        if found.target != f"exe.{key}":
            yield f"the region '{region}' is computed by {found.target:.40}, which is not its executable", region
    elif found.target != target_name(node.target):
        yield f"it calls {found.target}, expected {target_name(node.target)}", ""
    if found.backend != node.meta.get("backend"):
        yield f"its backend is {found.backend}, expected {node.meta.get('backend')}", ""
    arguments: dict[int | str, Any] = dict(enumerate(node.args)) | dict(node.kwargs.items())
    given: dict[int | str, Any] = dict(enumerate(found.args)) | dict(found.kwargs.items())
    for place in {**arguments, **given}:
        left, right = given.get(place), arguments.get(place)
        if (place in given) != (place in arguments) or not _same(left, right, names):
            wanted = names[right] if isinstance(right, fx.Node) else right
            text = f"its argument {place} is {_text(left)}, expected {wanted}"
            yield text, left.ref if isinstance(left, Ref) else ""
    results = result_names(node, names)
    op = op_of(node.target)
    updates = results[len(results) - len(op.states) :] if op and op.states else ()
    if found.updates != updates:
        yield f"it updates ({', '.join(found.updates)}), expected ({', '.join(updates)})", ""
    if found.results != results[: len(results) - len(updates)]:
        yield f"it yields ({', '.join(found.results)}), expected ({', '.join(results)})", ""


def _same(found: Argument, wanted: Any, names: Mapping[fx.Node, str]) -> bool:
    if isinstance(wanted, fx.Node):
        return isinstance(found, Ref) and found.ref == names[wanted]
    if isinstance(wanted, torch.dtype):
        return isinstance(found, DType) and DTYPES.get(found.dtype) is wanted
    if isinstance(wanted, list | tuple):
        return isinstance(found, tuple) and list(found) == list(wanted)
    return type(found) is type(wanted) and found == wanted


def _text(found: Argument) -> str:
    return f"'{found.ref}'" if isinstance(found, Ref) else str(found)


def _number(node: fx.Node, nodes: Sequence[fx.Node]) -> int:
    made_by = node if node in nodes else node.args[0]
    assert isinstance(made_by, fx.Node)
    return nodes.index(made_by)


def _lives(
    bucket: BucketPlan,
    nodes: Sequence[fx.Node],
    names: Mapping[fx.Node, str],
    program: Program,
    where: tuple[str, str],
) -> Iterator[PlanFault]:
    """Check the lifetimes of a plan's values. Yield the faults.

    Each value must be freed right after its last use. A view must not have a buffer.

    `nodes` are the calls of the instructions. `names` maps nodes to their names in the plan. `where` is the entry and
    the bucket class that faults are reported with.
    """
    kept = {names[node] for node in program.output_nodes().values()}
    last: dict[str, int] = {}
    for number, node in enumerate(nodes):
        for source in node.all_input_nodes:
            if source.op == "call_function" and isinstance(source.meta["type"], TensorType):
                last[names[source]] = number
    for number, instruction in enumerate(bucket.instructions):
        for name in instruction.frees:
            if name in kept or last.get(name) != number:
                use = "it is returned" if name in kept else f"instruction {last.get(name)} is the last to read it"
                yield PlanFault(*where, f"it frees '{name}', but {use}", number, nodes[number], name)
        for name in (name for name, at in last.items() if at == number and name not in kept):
            if name not in instruction.frees:
                yield PlanFault(*where, f"it does not free '{name}'", number, nodes[number], name)
    for number, node in enumerate(nodes):
        name = names.get(node, "")
        if node.target in VIEWS and (value := bucket.values.get(name)) and value.buffer != "view":
            yield PlanFault(*where, f"'{name}' is a view, but has a buffer of its own", number, node, name)
