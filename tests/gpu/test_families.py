"""Tiny checkpoints of every family, on a GPU by its kernels: the tokens are those of the references on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serve_artifact import Job, serve
from tiny import CHECKPOINTS, QUICK

from ingot import compile_model
from ingot.ir.numerics.tolerances import compare

pytestmark = pytest.mark.gpu
# Steps of all bucket classes: prompts reach 97 tokens, and are served together.
LIMITS: dict[str, Any] = {"max_batch": 8, "max_tokens": 512, "max_seq_len": 160}
NEW_TOKENS = 24
# Sums of another order in float32 through a handful of layers, in units of what one op may differ by.
FACTOR = 32.0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CHECKPOINTS]
)
def test_tokens_and_logits_are_those_of_the_references(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    plain, compiled = tmp_path / "plain.ingot", tmp_path / "compiled.ingot"
    compile_model(checkpoint(name), plain, target="cpu", backend="reference", dtype="float32", **LIMITS)
    report = compile_model(checkpoint(name), compiled, target="cuda", dtype="float32", **LIMITS)
    assert report.nodes_per_backend["triton"] > 0
    prompts = CHECKPOINTS[name].prompts()
    jobs = [Job(str(path), prompts, [prompts[-1], prompts[3]], NEW_TOKENS, chunked=False) for path in (plain, compiled)]
    expected, found = (serve(job) for job in jobs)
    assert found.tokens == expected.tokens
    for one, other in zip(found.logits, expected.logits, strict=True):
        problem = compare(one, other, other.dtype, factor=FACTOR)
        assert problem is None, problem
