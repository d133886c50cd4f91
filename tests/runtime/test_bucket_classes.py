"""Two bucket classes with different covers over the same resident weights: the executor picks one for each step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from backend_table import patch_backends
from tiny import TINY
from torch import fx

import ingot.compile.competing
import ingot.compile.request
from ingot import LLM, SamplingParams, compile_model
from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import Claim, No
from ingot.ir.machine.target import Target
from ingot.runtime.loading.loader import load_artifact

NAME = "llama-plain"
OPTIONS: dict[str, Any] = {"max_batch": 8, "max_tokens": 256, "max_seq_len": TINY[NAME].max_seq_len, "jobs": 1}
BUCKETS = (BucketClass(name="decode", tokens=(1, 8), q_max=1), BucketClass(name="any", tokens=(1, 256)))


class Decoding(Rowwise):
    """Takes everything in the decode class, and nothing elsewhere."""

    cost = 1.0

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        return super().claim(nodes, target, bucket) if bucket.name == "decode" else No("for decoding only")


class Prefilling(Inductor):
    """Compiles regions for all but the decode class."""

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        return super().claim(nodes, target, bucket) if bucket.name != "decode" else No("for long steps only")


def served(artifact: Path) -> tuple[list[Sequence[int]], dict[str, int]]:
    """Greedy tokens of all prompts, and how many steps each bucket class ran."""
    llm = LLM(artifact)
    steps: dict[str, int] = {}
    for bucket in llm._loaded.executor._lanes[0]:

        def counted(*args: Any, begin: Callable[..., Any] = bucket.begin, name: str = bucket.plan.bucket.name) -> Any:
            steps[name] = steps.get(name, 0) + 1
            return begin(*args)

        bucket.begin = counted  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": prompt} for prompt in TINY[NAME].prompts()]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)], steps


def compiled(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, output: Path, backends: dict[str, Callable[[], Any]]
) -> Path:
    monkeypatch.setattr(ingot.compile.request.Request, "buckets", lambda self, entry: BUCKETS)
    patch_backends(monkeypatch, backends)
    compile_model(checkpoint, output, **OPTIONS)
    return output


def check_covers(output: Path, whole: Path, decode: str, rest: str) -> None:
    plan = load_artifact(output, num_pages=16).plan
    by_name = {bucket.bucket.name: bucket for bucket in plan.buckets}
    assert set(by_name["decode"].nodes_per_backend()) == {decode}
    assert rest in by_name["any"].nodes_per_backend() and decode not in by_name["any"].nodes_per_backend()
    # One copy of every weight serves both.
    assert (output / "weights.json").read_bytes() == (whole / "weights.json").read_bytes()
    assert by_name["decode"].memory.sizes["T"] == 8 and by_name["any"].memory.sizes["T"] == 256
    assert by_name["decode"].memory.activations < by_name["any"].memory.activations
    tokens, steps = served(output)
    assert tokens == served(whole)[0]
    assert steps["decode"] >= 9 and steps["any"] >= 1


def test_backends_by_class(checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole.ingot"
    compile_model(checkpoint(NAME), whole, backend="reference", **OPTIONS)
    backends = {"rowwise": Decoding, "reference": Reference}
    output = compiled(monkeypatch, checkpoint(NAME), tmp_path / "two.ingot", backends)
    check_covers(output, whole, "rowwise", "reference")
    choices = json.loads((output / "choices.json").read_text())
    assert choices["any"]["refusals"]["reasons"] == ["rowwise: for decoding only"]


@pytest.mark.slow
def test_regions_in_one_class_only(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.ingot"
    compile_model(checkpoint(NAME), whole, backend="reference", **OPTIONS)
    backends = {"inductor": Prefilling, "rowwise": Decoding, "reference": Reference}
    output = compiled(monkeypatch, checkpoint(NAME), tmp_path / "two.ingot", backends)
    check_covers(output, whole, "rowwise", "inductor")
