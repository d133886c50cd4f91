"""A compile on a machine with a GPU: it is for that GPU, runs as it is served, and repeats bit by bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot import compile_model
from ingot.compile.golden import digest, read_golden, replay
from ingot.debug.verification import Promise
from ingot.debug.verify import verify
from ingot.ir.artifact.manifest import TIMINGS
from ingot.ir.artifact.manifest_file import MANIFEST
from ingot.ir.machine.target import Target
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import load_artifact

pytestmark = pytest.mark.gpu
NAME = "llama-plain"
# 65 tokens at least, for the largest bucket class.
OPTIONS: dict[str, Any] = {"target": "auto", "dtype": "bfloat16", "max_batch": 4, "max_tokens": 96}


@pytest.fixture(scope="module")
def made(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    report = compile_model(checkpoint(NAME), tmp_path_factory.mktemp("gpu") / "a.ingot", **OPTIONS)
    assert not report.no_golden_run
    return report.output


def test_auto_is_the_gpu_here(made: Path) -> None:
    assert json.loads((made / MANIFEST).read_text())["target"]["name"] == Target.detect("cuda").name


def test_it_repeats_bit_by_bit(made: Path) -> None:
    found = verify(made)
    assert found.holds and found.promise is Promise.BITWISE, found
    assert {one.bucket for one in found.results} == {"decode-1", "decode-16", "decode-32", "decode-64", "extend"}
    timed = json.loads((made / TIMINGS).read_text())["instructions"]
    assert timed and all(min(one["seconds"]) > 0 for one in timed.values())


def test_captured_graphs_give_what_single_instructions_give(made: Path) -> None:
    loaded, golden = load_artifact(made), read_golden(open_artifact(made))
    steps = golden.entries["main"].steps
    for output in replay(loaded, golden.requests, golden.schedule, golden.seed, timed=True):
        found = [digest(logits) for logits in output.logits]
        assert found == [row.digest for row in steps[output.number].rows], f"step {output.number}, {output.bucket}"
