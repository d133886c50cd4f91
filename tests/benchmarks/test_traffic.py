"""The bytes that a decode step moves."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import config_of
from staged import BACKENDS, LIMITS, staged, traced

from ingot.compile.competing import competing
from ingot.ir.artifact.plan import PlanFile
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.program import Program
from ingot.passes.pipeline import PIPELINE, pipeline_for


@pytest.mark.parametrize("way", ["calls", "regions", "gpu"])
@pytest.mark.parametrize("shape", ["1b", "8b", "qwen3-0.6b"])
def test_the_bytes_of_a_step(benchmarks: None, shape: str, way: str) -> None:
    """Against the sizes of the checkpoint's tensors, and the cache's size by hand; a layer of Qwen 3 has a window."""
    checkpoints = importlib.import_module("random_checkpoint")
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    config = config_of(shape, **(window if shape == "qwen3-0.6b" else {}))
    program = lowered(config, way)
    assert bool(program.regions) == (way != "calls")
    found = importlib.import_module("traffic").program_traffic(program, 3, 40.5)
    read = dict(checkpoints.tensor_shapes(config))
    if "lm_head.weight" in read:
        del read["model.embed_tokens.weight"]  # of which a step reads three rows
    assert found.weights == 2 * sum(map(math.prod, read.values()))
    position = 2 * 2 * 16 * 2  # keys and values of two heads of 16, in bfloat16
    seen = 40.5 + (24 if shape == "qwen3-0.6b" else 40.5)
    assert found.cache == 3 * (seen + 2) * position
    assert found.bytes == found.weights + found.cache


def test_the_bytes_of_a_rank(benchmarks: None) -> None:
    """Half of each matrix; whole gains of norms. Of its part of the embedding, a rank reads a few rows."""
    checkpoints = importlib.import_module("random_checkpoint")
    config = config_of("8b")
    sharded = staged(traced(config, LIMITS), pipeline_for({"tp": 2})[:-1], LIMITS, mesh={"tp": 2})[0][-1].program
    assert any(node.target is OPS["vocab_embedding"].overload for node in sharded.calls())
    read = dict(checkpoints.tensor_shapes(config))
    del read["model.embed_tokens.weight"]
    sizes = [math.prod(shape) // (2 if len(shape) > 1 else 1) for shape in read.values()]
    assert importlib.import_module("traffic").program_traffic(sharded, 3, 40.5).weights == 2 * sum(sizes)


def lowered(config: dict[str, Any], way: str) -> Program:
    """The program in front of its plan: for a CPU in single calls or with regions, or for a GPU, which fuses more."""
    target, limits = Target.detect("cpu"), LIMITS
    backends = BACKENDS if way == "regions" else BACKENDS[1:]
    if way == "gpu":
        pytest.importorskip("triton")
        target, limits = Target.named("sm_90"), replace(LIMITS, max_tokens=16)  # a class of decode steps
        backends = competing("auto", target)
    return staged(traced(config, limits), PIPELINE[:-1], limits, backends=backends, target=target)[0][-1].program


def test_the_traffic_of_an_artifact_is_what_its_plan_counts(artifact: Path, benchmarks: None) -> None:
    found = importlib.import_module("traffic").step_traffic(artifact, 2, 16 - 1)
    plan = PlanFile.model_validate_json((artifact / "plan.json").read_text()).of(0).plans["main"]
    assert found.cache == 2 * plan.memory.page  # a page holds 16 positions of all layers
    tables = plan.memory.weights - found.weights
    assert tables == 256 * 16 * 4  # the rotary table in f32, of which a step reads two rows
