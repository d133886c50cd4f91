"""Models with quantized weights by the kernels on a GPU: the tokens of the reference, in graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from frozen_serve import Job, serve
from gpu_model import LIMITS, MODEL

from ingot import compile_model
from ingot.runtime.cuda.graphs.sizes import is_capturable
from ingot.runtime.loader import load_artifact

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]
BATCHES = [[[7]], [list(range(1, 40))], [[n, n + 1, 3] for n in range(5)], [list(range(n, n + 70)) for n in range(3)]]
NEW_TOKENS = 12


@pytest.mark.parametrize(
    "format", ["int8", "int8_w8a8", "fp8", "fp8_per_channel_per_token", "int4_g64", "int4_g64_asym"]
)
def test_tokens_are_those_of_the_reference(format: str, tmp_path: Path) -> None:
    checkpoint, plain, made = MODEL.write(tmp_path / "checkpoint"), tmp_path / "plain.ingot", tmp_path / "made.ingot"
    passes = f"default,quantize{{format={format}}}"
    compile_model(checkpoint, plain, target="cpu", backend="reference", passes=passes, **LIMITS)
    report = compile_model(checkpoint, made, target="cuda", passes=passes, **{**LIMITS, "jobs": 4})
    calls = [node for bucket in report.plans.plans["main"].buckets for node in bucket.instructions]
    assert not [node for node in calls if node.target == "ingot.quant_linear" and node.backend != "triton"]
    buckets = load_artifact(made, num_pages=64).plan.buckets
    assert all(is_capturable(bucket) for bucket in buckets if bucket.bucket.name.startswith("decode"))
    assert serve(Job(str(made), BATCHES, NEW_TOKENS)).tokens == serve(Job(str(plain), BATCHES, NEW_TOKENS)).tokens
