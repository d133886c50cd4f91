"""Faults of the plan: an instruction that is not what its node says, made so by make-plan or on disk."""

import contextlib
import json
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

from resign import edit_json

from ingot.ir.artifact.plan import Plan
from ingot.ir.program import Program
from ingot.passes.base import PassContext
from ingot.passes.make_plan import MakePlan
from ingot.passes.rewrite import Rewriter
from planted.changes import pairs, wrong_edge
from planted.fault import Fault, NoFault, Setup, Truth, replaced

Json = dict[str, Any]
# A change of the instruction with a number, among those of its bucket class.
Edit = Callable[[list[Json]], None]


def draw(setup: Setup, programs: list[Program], draw: random.Random) -> Fault:
    program = draw.choice(programs)
    assert program.plan is not None and program.bucket is not None
    plan = program.plan.to_json()
    (bucket,) = plan["buckets"]
    found = list(_wrong_instructions(plan, bucket))
    if not found:
        raise NoFault(f"no instruction of {setup} has anything to mix up")
    label = draw.choice(sorted({name for name, *_ in found}))
    _, number, what, edit = draw.choice([item for item in found if item[0] == label])
    names = _names(program, bucket["instructions"], number)
    if label == "wrong order":  # of two that changed places either is to blame
        names += _names(program, bucket["instructions"], number - 1)
    name = program.bucket.name

    if draw.random() < 0.5:

        def damage_json(plans: Any) -> None:
            for one in plans["positions"]["all"]["plans"]["main"]["buckets"]:
                if one["bucket"]["name"] == name:
                    edit(one["instructions"])

        truth = Truth("plan", "", f"{what}, in plan.json", names, bucket=name)
        return Fault(label, setup, truth, damage=lambda artifact: edit_json(artifact, "plan.json", damage_json))
    truth = Truth("plan", "", what, names, bucket=name, as_pass="make-plan")
    return Fault(label, setup, truth, lambda: _planted(name, edit))


@contextlib.contextmanager
def _planted(name: str, edit: Edit) -> Iterator[None]:
    run = MakePlan.run

    def planted(self: MakePlan, rewriter: Rewriter, context: PassContext) -> None:
        run(self, rewriter, context)
        plan = rewriter.program.plan
        if plan is not None and rewriter.program.bucket is not None and rewriter.program.bucket.name == name:
            found = plan.to_json()
            edit(found["buckets"][0]["instructions"])
            rewriter.program.plan = Plan.model_validate_json(json.dumps(found))

    with replaced(MakePlan, "run", planted):
        yield


def _names(program: Program, instructions: list[Json], number: int) -> tuple[str, ...]:
    """What the instruction's node is called: in the program, and by its results."""
    node = [node for node in program.calls() if node.target is not operator.getitem][number]
    users = [user.name for user in node.users if user.target is operator.getitem]
    return tuple(dict.fromkeys([node.name, *users, *(name for name in instructions[number]["results"] if name)]))


def _wrong_instructions(plan: Json, bucket: Json) -> Iterator[tuple[str, int, str, Edit]]:
    """Class, number, words, and the change, of what would still load."""
    types = {
        **plan["inputs"],
        **plan["params"],
        **{name: state["type"] for name, state in plan["states"].items()},
        **{name: value["type"] for name, value in bucket["values"].items()},
    }
    live = [*plan["inputs"], *plan["params"], *plan["states"]]
    for number, instruction in enumerate(bucket["instructions"]):
        # Whole numbers address memory, and compiled kernels trust them: a wrong one may end the process.
        refs = [
            (place, arg["ref"])
            for place, arg in enumerate(instruction["args"])
            if _is_ref(arg) and not types[arg["ref"]].startswith("i")
        ]
        frees = set(instruction["frees"])
        for (left, one), (right, other) in pairs(refs):
            if one != other and types[one] == types[other] and instruction["target"] != "aten.add.Tensor":
                what = f"instruction {number} takes {one} and {other} the other way"
                yield "swapped arguments", number, what, _swap(number, left, right)
        for place, ref in refs:
            if ref in plan["states"] and ref in instruction["updates"]:
                continue
            for other in live:
                if other != ref and types.get(other) == types[ref] and ref not in frees and other != ref:
                    label = "wrong cache" if ref in plan["states"] else "wrong value"
                    yield label, number, f"instruction {number} reads {other}, not {ref}", _read(number, place, other)
        for name, value in instruction["kwargs"].items():
            for wrong in _wrong_constants(name, value):
                what = f"{name} of instruction {number} is {wrong}, not {value}"
                yield f"wrong {name}", number, what, _set(number, name, wrong)
        later = bucket["instructions"][number + 1] if number + 1 < len(bucket["instructions"]) else None
        if later is not None and instruction["updates"] and set(instruction["updates"]) & _refs(later):
            what = f"instruction {number + 1} runs before {number}, which updates what it reads"
            yield "wrong order", number + 1, what, _exchange(number)
        live += [name for name in instruction["results"] if name]
        live = [name for name in live if name not in frees]


def _is_ref(argument: Any) -> bool:
    return isinstance(argument, dict) and "ref" in argument


def _refs(instruction: Json) -> set[str]:
    return {arg["ref"] for arg in instruction["args"] if _is_ref(arg)}


def _wrong_constants(name: str, value: Any) -> list[Any]:
    if name in ("eps", "scale", "soft_cap", "cap", "limit"):
        return [value * 1.5]
    return [wrong_edge(value, 1)] if name == "mask" else []


def _swap(number: int, left: int, right: int) -> Edit:
    def edit(instructions: list[Json]) -> None:
        args = instructions[number]["args"]
        args[left], args[right] = args[right], args[left]

    return edit


def _read(number: int, place: int, other: str) -> Edit:
    def edit(instructions: list[Json]) -> None:
        instructions[number]["args"][place] = {"ref": other}

    return edit


def _set(number: int, name: str, value: Any) -> Edit:
    def edit(instructions: list[Json]) -> None:
        instructions[number]["kwargs"][name] = value

    return edit


def _exchange(number: int) -> Edit:
    def edit(instructions: list[Json]) -> None:
        first, second = instructions[number], instructions[number + 1]
        frees = [*first["frees"], *second["frees"]]
        instructions[number], instructions[number + 1] = {**second, "frees": []}, {**first, "frees": frees}

    return edit
