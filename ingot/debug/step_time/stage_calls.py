"""Find the calls of a program that are the instructions of a plan. A pipeline stage has some of them."""

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from ingot.ir.artifact.plan import BucketPlan, Instruction, Ref
from ingot.ir.errors import ArtifactError
from ingot.ir.program import Program, names_in_plan, states_written
from ingot.ir.types import StateType

# The names of what a call returns, of the states that it updates, and of what it reads.
_Names = tuple[frozenset[str], tuple[str, ...], frozenset[str]]


def calls_of(program: Program, plan: BucketPlan) -> list[fx.Node]:
    """Return the call of each instruction, in order. `plan` is the plan of the program or of a pipeline stage.

    Raises ArtifactError if an instruction is no call of the program, or if the plan of a program lacks a call.
    """
    nodes, named = [node for node in program.calls() if node.target is not operator.getitem], names_in_plan(program)
    found: list[fx.Node] = []
    rest = iter(nodes)
    for number, one in enumerate(plan.instructions):
        wanted = _of_instruction(one)
        node = next((node for node in rest if _of_call(node, named) == wanted), None)
        if node is None:
            raise _mismatch(f"instruction {number}, {one.target}, is no call of the program", plan, nodes)
        found.append(node)
    if plan.transfers is None and len(found) != len(nodes):
        raise _mismatch(f"the plan has {len(found)} instructions", plan, nodes)
    return found


def instructions_of(program: Program, plans: Sequence[BucketPlan]) -> dict[fx.Node, Instruction]:
    """Return the instruction of each call of the program. `plans` are those of all pipeline stages.

    Raises ArtifactError if the plans do not match the program.
    """
    found = {
        node: instruction
        for plan in plans
        for node, instruction in zip(calls_of(program, plan), plan.instructions, strict=True)
    }
    nodes = [node for node in program.calls() if node.target is not operator.getitem]
    if len(found) != len(nodes):
        raise _mismatch(f"the plans of all stages have {len(found)} instructions", plans[0], nodes)
    return {node: found[node] for node in nodes}


def _mismatch(what: str, plan: BucketPlan, nodes: Sequence[fx.Node]) -> ArtifactError:
    return ArtifactError(
        what,
        where=f"plan.json, bucket class {plan.bucket.name}",
        expected=f"{len(nodes)}, the calls of the program",
    )


def _of_call(node: fx.Node, named: Mapping[fx.Node, str]) -> _Names:
    updates = tuple(named[version] for version in states_written(node))
    taken = [user for user in node.users if user.target is operator.getitem]
    if getattr(node.meta["type"], "items", None) is not None:
        results = {named[one] for one in taken if not isinstance(one.meta["type"], StateType)}
    else:
        results = set() if updates else {named[node]}
    return frozenset(results), updates, frozenset(named[source] for source in node.all_input_nodes)


def _of_instruction(one: Instruction) -> _Names:
    read = (arg.ref for arg in (*one.args, *one.kwargs.values()) if isinstance(arg, Ref))
    return frozenset(filter(None, one.results)), one.updates, frozenset(read)
