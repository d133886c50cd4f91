"""Fuel: a pass stops after as many rewrites as it has fuel for, wherever a part of its rewrites makes sense."""

import itertools

import pytest
from staged import LIMITS, pass_context, staged
from tiny import TINY

from ingot.frontend.trace import trace
from ingot.ir.program import Model, Stage
from ingot.models.architectures import read_spec
from ingot.passes.manager import run_pass
from ingot.passes.pipeline import OPTIONAL, PIPELINE

PASSES = {one.name: one for phase in PIPELINE for one in phase.passes if one.name in OPTIONAL}


@pytest.fixture(scope="module")
def model() -> Model:
    return trace(read_spec(TINY["qwen3-plain"].config), LIMITS)


def test_less_fuel_is_fewer_rewrites_at_the_same_places(model: Model) -> None:
    steps, _ = staged(model)
    seen = set()
    for before, after in itertools.pairwise(steps):
        record = after.record
        assert record is not None
        if after.name not in PASSES or record.matches < 2:
            continue
        one = PASSES[after.name]
        context = pass_context(bucket=before.program.bucket)
        for fuel in (0, 1, record.matches - 1):
            _, less = run_pass(one, before.program, context, under=Stage[record.stage], fuel=fuel)
            assert less.matches == fuel
            assert [item.anchor for item in less.rewrites] == [item.anchor for item in record.rewrites[:fuel]]
            assert (fuel == 0) == (less.ir_after.partition("\n")[2] == record.ir_before.partition("\n")[2])
        seen.add(after.name)
    assert seen >= {"merge-linears", "fuse-add-rms-norm", "select-rows-early"}


def test_what_a_rewrite_made_is_named(model: Model) -> None:
    steps, lowered = staged(model)
    records = [step.record for step in steps if step.record is not None]
    merged = next(record for record in records if record.name == "merge-linears")
    first = merged.rewrites[0]
    assert first.index == 0 and f"%{first.anchor} = ingot.linear" in merged.ir_before and "layer 0" in first.origin
    assert any(name.startswith("layers.0.") for name in first.made)
    for rewrite in merged.rewrites:
        assert rewrite.made and all(
            f"%{name} = " in merged.ir_after or f"param {name}:" in merged.ir_after for name in rewrite.made
        )
    assert [record for program in lowered.programs.values() for record in program.history] == records
