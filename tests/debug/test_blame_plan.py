"""Plans that are not what their programs say, signed again: the instruction is named, and the call it stands for."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resign import edit_json
from staged import staged, traced
from tiny import CHECKPOINTS

from ingot.backends.inductor.emit import Inductor
from ingot.compile.identity import exe_key
from ingot.debug.bisect.execution.blame_execution import region_keys
from ingot.debug.bisect.execution.blame_plan import plan_fault
from ingot.debug.bisect.verdict import Kind
from ingot.ir.artifact.plan import Plan
from ingot.ir.machine.target import Target
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.text import print_program

NAME = "llama-biased"

Instructions = list[dict[str, Any]]


def of(instructions: Instructions, target: str, nth: int = 0) -> dict[str, Any]:
    return [one for one in instructions if one["target"] == target][nth]


def another_option(instructions: Instructions) -> None:
    of(instructions, "ingot.rms_norm")["kwargs"]["eps"] *= 10


def other_value(instructions: Instructions) -> None:
    """The residual of the next layer is the embedding once more."""
    of(instructions, "ingot.add_rms_norm", 1)["args"][1] = {"ref": "embedding"}
    of(instructions, "ingot.add_rms_norm")["frees"].remove("embedding")


def swapped_arguments(instructions: Instructions) -> None:
    args = of(instructions, "ingot.silu_mul")["args"]
    args[0], args[1] = args[1], args[0]


def other_state(instructions: Instructions) -> None:
    append = of(instructions, "ingot.kv_append", 1)
    append["args"][0], append["updates"] = {"ref": "kv.0"}, ["kv.0"]


def freed_early(instructions: Instructions) -> None:
    """Loading refuses such a plan: it is read before."""
    last = next(one for one in instructions if "embedding" in one["frees"])
    last["frees"].remove("embedding")
    of(instructions, "ingot.rms_norm")["frees"].append("embedding")


def never_freed(instructions: Instructions) -> None:
    next(one for one in instructions if "embedding" in one["frees"])["frees"].remove("embedding")


def other_backend(instructions: Instructions) -> None:
    of(instructions, "ingot.linear", 2)["backend"] = "rowwise"


def other_slice(instructions: Instructions) -> None:
    first = of(instructions, "aten.slice.Tensor")["args"]
    first[2], first[3] = first[2] + 1, first[3] + 1


def left_out(instructions: Instructions) -> None:
    del instructions[instructions.index(of(instructions, "ingot.count_tokens"))]


FAULTS: dict[str, tuple[Callable[[Instructions], None], str, str]] = {
    "another option": (another_option, "ingot.rms_norm", "its argument eps is"),
    "another value": (other_value, "ingot.add_rms_norm", "its argument 1 is 'embedding'"),
    "swapped arguments": (swapped_arguments, "ingot.silu_mul", "its argument 0 is"),
    "another state": (other_state, "ingot.kv_append", "its argument 0 is 'kv.0', expected kv.1"),
    "freed early": (freed_early, "ingot.rms_norm", "it frees 'embedding', but instruction"),
    "never freed": (never_freed, "", "it does not free 'embedding'"),
    "another backend": (other_backend, "ingot.linear", "its backend is rowwise, expected reference"),
    "another slice": (other_slice, "aten.slice.Tensor", "its argument 2 is 1, expected 0"),
    "left out": (left_out, "ingot.count_tokens", "expected ingot.count_tokens"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_plan_is_named(
    name: str, artifact: Callable[..., Path], blame: Callable[..., Any], tmp_path: Path
) -> None:
    change, op, words = FAULTS[name]
    folder = tmp_path / "faulty.ingot"
    shutil.copytree(artifact(NAME, backend="reference"), folder)

    def edit(file: Any) -> None:
        change(file["positions"]["all"]["plans"]["main"]["buckets"][0]["instructions"])

    edit_json(folder, "plan.json", edit)
    verdict = blame(folder, NAME)
    assert verdict is not None and (verdict.kind, verdict.blamed) == (Kind.PLAN, "make-plan"), verdict
    assert words in verdict.found and verdict.op.startswith(op), verdict
    assert verdict.runs == 0, "nothing needs to run"


@pytest.fixture(scope="module")
def with_regions() -> tuple[Plan, Program]:
    _, lowered = staged(traced(CHECKPOINTS["mistral-window"].config))
    (program,) = lowered.programs.values()
    assert program.plan is not None
    return program.plan, parse_program(print_program(program))


def called_by(plan: Plan, change: Callable[[list[str]], None]) -> Plan:
    """The plan with other executables for the calls of its regions, in order."""
    (bucket,) = plan.buckets
    places = [at for at, one in enumerate(bucket.instructions) if one.target.startswith("exe.")]
    instructions, targets = list(bucket.instructions), [bucket.instructions[at].target for at in places]
    change(targets)
    for at, target in zip(places, targets, strict=True):
        instructions[at] = instructions[at].model_copy(update={"target": target})
    return plan.model_copy(update={"buckets": (bucket.model_copy(update={"instructions": tuple(instructions)}),)})


def test_a_plan_with_regions_is_what_its_program_says(with_regions: tuple[Plan, Program]) -> None:
    plan, program = with_regions
    assert plan_fault(plan, {"any": program}, {}) is None
    assert plan_fault(plan, {"any": program}, {"any": {name: f"exe_{name}" for name in program.regions}}) is None


def test_an_executable_of_another_region(with_regions: tuple[Plan, Program]) -> None:
    """By its id where that is known; else since two calls of one region have two executables."""
    plan, program = with_regions
    keys = {"any": {name: f"exe_{name}" for name in program.regions}}

    def another(targets: list[str]) -> None:
        targets[0] = targets[-1]

    fault = plan_fault(called_by(plan, another), {"any": program}, keys)
    assert fault is not None and fault.node is not None and "which is not its executable" in fault.text
    (bucket,) = plan.buckets
    calls = [one.target for one in bucket.instructions if one.target.startswith("exe.")]
    repeated = next(at for at, target in enumerate(calls) if calls.count(target) > 1)

    def once(targets: list[str]) -> None:
        targets[repeated] = targets[-1]

    fault = plan_fault(called_by(plan, once), {"any": program}, {})
    assert fault is not None and "which is not its executable" in fault.text


def test_ids_that_cannot_be_computed_again_are_not_a_fault(with_regions: tuple[Plan, Program]) -> None:
    _, program = with_regions
    other = region_keys({"any": program}, frozenset({"made by another toolchain"}), Target.detect("cpu"))
    assert other == {"any": {}}
    one = exe_key(next(iter(program.regions.values())), Inductor(), Target.detect("cpu"))
    known = region_keys({"any": program}, frozenset({one}), Target.detect("cpu"))
    assert known["any"].keys() == program.regions.keys() and one in known["any"].values()
