"""Diffs of random rewordings are empty, and of random edits never: families, stages, quantized and on a mesh."""

import itertools
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache

import pytest
from meaning import meaning
from respelled import respelled
from run_seed import again, run_seed
from semantic_edits import (
    EDITS,
    another_call_backend,
    another_cast,
    another_input_type,
    another_op,
    another_param_type,
    another_placement,
    another_recipe,
    another_region_backend,
    another_scale,
    another_value,
    dropped_bias,
    left_out,
    put_in,
    region_twice,
    twice,
)
from sharded import CASES
from staged import LIMITS, staged, traced
from tiny import TINY

from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.text import print_program
from ingot.ir.verify import verify
from ingot.passes.pipeline import edit_pipeline, pipeline_for

pytestmark = [pytest.mark.xdist_group("diff-random"), pytest.mark.one_in_file(3)]

# A checkpoint of `tiny`, a text for --passes, and a case of `sharded`: the first are quick.
SOURCES = (
    ("llama-biased", "default", ""),
    ("llama-scaled", "default,quantize{format=int8,lm_head=true}", ""),
    ("llama-scaled", "default", "key-value groups"),
    ("gemma3_text-old", "default", ""),
    ("cohere-normed", "default", ""),
    ("phi3-long", "default", ""),
    ("smollm3-nope", "default", ""),
    ("qwen3-scaled", "default", ""),
)
QUICK_SOURCES = 3
DRAWS, QUICK_DRAWS = 200, len(EDITS)
Programs = Mapping[str, Program]


@lru_cache(maxsize=len(SOURCES))
def _stages(name: str, pipeline: str, case: str) -> Programs:
    """The program at the end of each stage, read back from its text."""
    config = {**TINY[name].config, **(CASES[case].changes if case else {})}
    mesh = CASES[case].mesh if case else {}
    steps, _ = staged(traced(config), edit_pipeline(pipeline, pipeline_for(mesh)), LIMITS, mesh=mesh)
    ends = {
        step.program.stage.name: step.program
        for step in steps
        # A pass inside of a stage leaves a program that is of the stage before and keeps the rules of neither.
        if (step.record is None or step.record.stage == step.program.stage.name) and step.program.plan is None
    }
    return {f"{name} {pipeline} {case} {stage}": parse_program(print_program(one)) for stage, one in ends.items()}


def _programs(sources: Sequence[tuple[str, str, str]]) -> Programs:
    found = {name: program for source in sources for name, program in _stages(*source).items()}
    stages = {program.stage.name for program in found.values()}
    assert stages == {"TRACED", "NORMAL", "QUANTIZED", "SHARDED", "CACHED", "FUSED", "LOWERED"}
    assert any(program.regions for program in found.values()) and any(program.mesh for program in found.values())
    return found


@pytest.mark.parametrize("name", ["llama-biased", pytest.param("gemma3_text-old", marks=pytest.mark.slow)])
def test_what_a_stage_does_takes_as_many_lines_at_any_depth(name: str) -> None:
    lines = []
    for layers in (4, 5):
        config = {**TINY[name].config, "num_hidden_layers": layers}
        config.pop("layer_types", None)
        steps, _ = staged(traced(config))
        texts = [str(before.program.diff(after.program)) for before, after in itertools.pairwise(steps)]
        lines.append([len(text.splitlines()) for text in texts])
    assert lines[0] == lines[1] and sum(lines[0]) > 50


DRAWN = [
    pytest.param(QUICK_SOURCES, range(QUICK_DRAWS), id="quick"),
    pytest.param(len(SOURCES), range(DRAWS), id="all", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("sources", "numbers"), DRAWN)
def test_names_order_and_spelling_do_not_show(sources: int, numbers: range) -> None:
    programs = _programs(SOURCES[:sources])
    for number in numbers:
        draw = random.Random(f"{run_seed()} rewording {number}")
        name = draw.choice(sorted(programs))
        program, what = programs[name], f"{name}, {again(number)}"
        for repeat in draw.choices((twice, region_twice), k=draw.randrange(4)):  # equal values, by several calls
            program = repeat(program, draw) or program
        reworded = respelled(program, draw)
        verify(reworded)
        assert print_program(reworded) != print_program(program), what
        assert meaning(reworded) == meaning(program), what
        assert not (found := program.diff(reworded)), f"{what}\n{found}"
        assert not (found := reworded.diff(program)), f"{what}\n{found}"


@pytest.mark.parametrize(("sources", "numbers"), DRAWN)
def test_an_edit_always_shows(sources: int, numbers: range) -> None:
    programs, kinds = _programs(SOURCES[:sources]), set()
    for number in numbers:
        # Each kind in turn, on the first of the programs in random order that has a place for it.
        draw = random.Random(f"{run_seed()} edit {number}")
        edit = EDITS[number % len(EDITS)]
        for name in draw.sample(sorted(programs), len(programs)):
            edited = edit(programs[name], draw)
            if edited is not None and meaning(edited) != meaning(programs[name]):
                break
        else:
            pytest.fail(f"nowhere to try {edit.__name__}")
        kinds.add(edit)
        what = f"{edit.__name__} of {name}, {again(number)}"
        reworded = respelled(programs[name], draw)
        for before, after in ((programs[name], edited), (edited, programs[name]), (reworded, edited)):
            found = before.diff(after)
            assert found and str(found) and not found.to_json()["equal"], what
    assert len(kinds) == len(EDITS) >= 15


# What is one difference wherever it is made: nothing that follows from it is listed beside it.
ONE_LINE = (
    another_call_backend,
    another_cast,
    another_input_type,
    another_op,
    another_param_type,
    another_placement,
    another_region_backend,
    another_recipe,
    another_scale,
    another_value,
    dropped_bias,
    left_out,
    put_in,
    twice,
)


@pytest.mark.parametrize(("sources", "numbers"), DRAWN)
def test_one_edit_is_one_difference(sources: int, numbers: range) -> None:
    programs = _programs(SOURCES[:sources])
    for number in numbers:
        draw = random.Random(f"{run_seed()} one {number}")
        edit = ONE_LINE[number % len(ONE_LINE)]
        for name in draw.sample(sorted(programs), len(programs)):
            edited = edit(programs[name], draw)
            if edited is not None and meaning(edited) != meaning(programs[name]):
                break
        else:
            pytest.fail(f"nowhere to try {edit.__name__}")
        found = respelled(programs[name], draw).diff(edited)
        everything = [*found.header, *found.changed, *found.added, *found.removed]
        lines = [line for line in str(found).splitlines() if not line.startswith("in layers ")]
        assert len(everything) == len(lines) == 1, f"{edit.__name__} of {name}, {again(number)}\n{found}"
