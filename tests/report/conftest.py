"""Reports of a tiny model, one of them with regions and two bucket classes; and a browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import fx

    from ingot.debug.explained import BucketCosts
    from ingot.debug.step_time.times import CallTime, StepTime
    from ingot.ir.program import Program
    from ingot.report.data import Report

LAYERS = 5


@pytest.fixture(scope="session")
def deep_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers: the first and the last differ from those between them once norms are fused."""
    from tiny import TINY

    return TINY["qwen3-scaled"].write(tmp_path_factory.mktemp("report") / "checkpoint", num_hidden_layers=LAYERS)


@pytest.fixture(scope="session")
def compiled(deep_checkpoint: Path) -> Path:
    from ingot import compile_model

    output = deep_checkpoint.with_name("model.ingot")
    compile_model(deep_checkpoint, output, backend="reference", max_batch=8, max_tokens=256, max_seq_len=160)
    return output


@pytest.fixture(scope="session")
def plain_report(compiled: Path) -> Report:
    """An artifact's, with one bucket class."""
    from ingot.report.data import read_report
    from ingot.runtime.loading.artifact import open_artifact

    return read_report(open_artifact(compiled))


@pytest.fixture(scope="session")
def region_report(plain_report: Report, deep_checkpoint: Path) -> Report:
    """The same model lowered for two bucket classes, one of which has regions; nothing is compiled."""
    import json

    from staged import pass_context, traced

    from ingot.compile.merged_plans import merged_plans
    from ingot.debug.explained import Explained
    from ingot.ir.artifact.plan import BucketClass
    from ingot.ir.text import print_program
    from ingot.passes.manager import run_pipeline
    from ingot.report.data import Step, linked, node_tables
    from ingot.report.memory import resident, step_memories
    from ingot.report.step_times import drawn_steps

    model = traced(json.loads((deep_checkpoint / "config.json").read_text()))
    buckets = BucketClass(name="decode", tokens=(1, 16)), BucketClass(name="extend", tokens=(17, 256))
    lowered = run_pipeline(model, pass_context(bucket=None), buckets)
    runs = [
        Step(
            name=one.name,
            entry=one.entry,
            bucket=one.bucket,
            stage=one.stage,
            text=one.ir_after,
            options=one.options,
            numerics=one.numerics.value,
            matches=one.matches,
            rewrites=tuple((rewrite.anchor, rewrite.made) for rewrite in one.rewrites),
            refusals=tuple((refusal.node, refusal.reason) for refusal in one.refusals),
            op_count_diff=one.op_count_diff,
        )
        for one in lowered.records
    ]
    steps = linked({name: print_program(program) for name, program in model.entries.items()}, runs)
    costs = tuple(_costs(program) for program in lowered.programs.values())
    explained = Explained(Path(), plain_report.build_id, costs, (), plain_report.caches)
    plans = merged_plans({"main": lowered})
    nodes = node_tables(explained, steps)
    return replace(
        plain_report,
        steps=steps,
        nodes=nodes,
        step_times=drawn_steps(costs, [one.step for one in nodes], [one.basis for one in nodes]),
        memories=step_memories(plans),
        resident=resident(plans),
        start_up={"Python": 0.1, "imports": 2.5},
    )


def _costs(program: Program) -> BucketCosts:
    """Every call of a lowered program, those of a region behind it, with costs that tell them apart; the first three
    with times, as if a GPU ran two products and a norm."""
    from dataclasses import replace as changed

    from ingot.debug.explained import BucketCosts, Call, StepShape
    from ingot.ir.program import RegionCall, target_name
    from ingot.report.lines import layer_of

    calls: list[Call] = []

    def add(node: fx.Node, backend: str, region: str = "") -> None:
        origin, number = node.meta.get("origin", ""), len(calls)
        claims = {"cpu": "no kernel", backend: 0.5 + number} if number % 2 else {backend: 0.25}
        facts = (layer_of(origin), origin, number * 7919 % 1009, number * 104729 % 997, backend, claims)
        calls.append(Call(node.name, target_name(node.target), *facts, seconds=number / 1e6, region=region))

    for node in program.calls():
        add(node, node.meta.get("backend", ""))
        if isinstance(node.target, RegionCall):
            for inner in program.regions[node.target.name].body.calls():
                add(inner, node.meta["backend"], node.name)
    assert program.bucket is not None
    times, step = _times()
    calls[:3] = [changed(call, flops=900, bytes=90, time=time) for call, time in zip(calls, times, strict=False)]
    return BucketCosts(program.name, program.bucket.name, StepShape(16, 16, 128, (5, 1, 5)), tuple(calls), step)


def _times() -> tuple[list[CallTime], StepTime]:
    from ingot.debug.step_time.times import CallTime, Gap, StepTime, kind_times

    calls = [
        CallTime("products", "compute", 2e-6, 3e-6),
        CallTime("products", "compute", 2e-6, 3e-6),
        CallTime("norms", "memory", 1e-6, 4e-6),
    ]
    gaps = (Gap("norm", 1, 3e-6, "fused, it is saved"), Gap("between calls", 0, 2e-6, "launched one by one"))
    step = StepTime(
        "NVIDIA H200", 10**12, 10**15, "constants", True, 5e-6, 12e-6, None, None, kind_times(calls, 12e-6, None), gaps
    )
    return calls, step
