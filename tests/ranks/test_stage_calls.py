"""Which calls of a program a pipeline stage has, by its plan."""

import operator
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.debug.step_time.stage_calls import calls_of, instructions_of
from ingot.ir.artifact.plan import BucketPlan
from ingot.ir.errors import ArtifactError
from ingot.ir.parse import parse_programs
from ingot.ir.program import Program, target_name
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.plan_file import read_plan_file

pytestmark = pytest.mark.xdist_group("ranks")


def opened(path: Path) -> tuple[Program, list[BucketPlan]]:
    artifact = open_artifact(path)
    (program,) = parse_programs(artifact.read_text("program.ir"))
    stages = read_plan_file(artifact).positions.values()
    return program, [one.plans["main"].buckets[0] for one in stages]


def test_a_stage_has_the_calls_of_its_layers(artifact: Callable[[str, str], Path]) -> None:
    program, stages = opened(artifact("llama", "pp=2"))
    first, last = ([node.name for node in calls_of(program, stage)] for stage in stages)
    layers = [[str(node.meta["origin"]) for node in calls_of(program, stage)] for stage in stages]
    assert not any(origin.startswith("layer 2") for origin in layers[0]) and "embedding" in first
    assert not any(origin.startswith("layer 0") for origin in layers[1]) and "sample" in last
    assert set(first) & set(last) and len(set(first)) == len(first)
    found = instructions_of(program, stages)
    assert list(found) == [node for node in program.calls() if node.target is not operator.getitem]
    assert all(target_name(node.target) == one.target for node, one in found.items())
    program, (whole,) = opened(artifact("llama", "tp=2"))
    assert len(calls_of(program, whole)) == len(whole.instructions) == len(instructions_of(program, [whole]))


def test_plans_of_another_program(artifact: Callable[[str, str], Path]) -> None:
    program, stages = opened(artifact("llama", "pp=2"))
    with pytest.raises(ArtifactError, match="the plans of all stages have"):
        instructions_of(program, stages[:1])
    first, second, *rest = stages[0].instructions
    with pytest.raises(ArtifactError, match="is no call of the program"):
        calls_of(program, stages[0].model_copy(update={"instructions": (second, first, *rest)}))
    changed = first.model_copy(update={"updates": ("another",)})
    with pytest.raises(ArtifactError, match=f"instruction 0, {first.target}, is no call of the program"):
        calls_of(program, stages[0].model_copy(update={"instructions": (changed, second, *rest)}))
    program, (whole,) = opened(artifact("llama", "tp=2"))
    short = whole.model_copy(update={"instructions": whole.instructions[:-1]})
    with pytest.raises(ArtifactError, match=f"the plan has {len(short.instructions)} instructions"):
        calls_of(program, short)
