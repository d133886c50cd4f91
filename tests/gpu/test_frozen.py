"""An artifact for a GPU serves in a process that cannot build anything, in every bucket class and by its graphs."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from frozen_serve import Job, serve, serve_frozen
from gpu_model import LIMITS, MODEL

from ingot import compile_model
from ingot.ir.machine.find_gpu import find_gpu
from ingot.runtime.cuda.graphs.sizes import decode_steps, prompt_steps

# Prompts whose steps lie in each bucket class, and batches whose decode steps do.
PROMPTS, BATCHES = (1, 3, 16, 20, 33, 64, 65, 200), (1, 2, 5, 16, 17, 32, 33, 64, 65, 96)


def batches() -> list[list[list[int]]]:
    draw = random.Random(MODEL.seed)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(512) for _ in range(length)]

    return [[prompt(length)] for length in PROMPTS] + [[prompt(1 + n % 4) for n in range(count)] for count in BATCHES]


@pytest.mark.gpu
def test_a_frozen_process_serves_every_bucket_class(tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "checkpoint")
    plain, compiled = tmp_path / "plain.ingot", tmp_path / "compiled.ingot"
    compile_model(checkpoint, plain, target="cpu", backend="reference", **LIMITS)
    report = compile_model(checkpoint, compiled, target="cuda", **LIMITS)
    assert list(compiled.glob("exe/*/*/*.cubin"))
    frozen = serve_frozen(Job(str(compiled), batches(), 8), os.environ, tmp_path)
    assert frozen.tokens == serve(Job(str(plain), batches(), 8)).tokens
    assert set(frozen.buckets) == {bucket.bucket.name for bucket in report.plans.plans["main"].buckets}
    assert frozen.refused == []
    plan = report.plans.plans["main"]
    sizes = decode_steps(plan)
    assert {served.bucket.name for served in sizes.values()} == {one.bucket.name for one in plan.buckets} - {"extend"}
    assert {min(size.B for size in sizes if count <= size.B) for count in BATCHES} <= set(frozen.graphs)
    assert {served.bucket.name for served in prompt_steps(plan, find_gpu()).values()} == {"extend"}
