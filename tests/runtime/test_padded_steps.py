"""A step filled up to the sizes of a graph computes what it computes alone, and changes nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from run_seed import again, run_seed

from ingot import compile_model
from ingot.ir.harness import scheduled
from ingot.runtime.cuda import staging
from ingot.runtime.cuda.staging import HostInputs
from ingot.runtime.loader import load_artifact
from ingot.runtime.step import StepSizes

REQUESTS, LONGEST, PAGES = 5, 40, 64
NAME = "qwen3-plain"


class HostInts:
    """What `PinnedInts` is, on a machine without a GPU."""

    def __init__(self, shape: list[int]) -> None:
        self.host = torch.zeros(shape, dtype=torch.int32)


@pytest.fixture(scope="module")
def made(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("padded") / "a.ingot"
    compile_model(
        checkpoint(NAME), output, backend="reference", dtype="float32", max_batch=16, max_tokens=96, max_seq_len=64
    )
    return output


def test_padding_changes_nothing(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PinnedInts", HostInts)
    alone, padded = (load_artifact(made, num_pages=PAGES).executor for _ in range(2))
    draw = random.Random(run_seed())
    requests = [[draw.randrange(100) for _ in range(LONGEST)] for _ in range(REQUESTS)]
    # Pieces of prompts beside single tokens, of any of the requests; sizes go up and down, as graphs are filled anew.
    left = [LONGEST] * REQUESTS
    schedule = []
    while any(left):
        among = draw.sample(range(REQUESTS), draw.randint(1, REQUESTS))
        counts = [(index, min(left[index], draw.choice([1, 1, 1, 3, 9]))) for index in sorted(among)]
        if fed := [(index, count) for index, count in counts if count]:
            schedule.append(fed)
            for index, count in fed:
                left[index] -= count
    size = StepSizes(T=48, B=7, L=48, P=9)
    host = HostInputs(size)

    def both(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        tokens, rows = len(inputs["tokens"]), len(inputs["rows"])
        expected = alone.launch(inputs).outputs
        host.fill(inputs)
        views = {name: torch.from_numpy(array) for name, array in host._arrays.items() if name in inputs}
        found = padded.launch(views).outputs
        for name, value in expected.items():
            torch.testing.assert_close(found[name][:tokens], value, msg=lambda said, name=name: f"{name}: {said}")
        for name, state in alone.states.items():
            what = again((name, tokens, rows))
            torch.testing.assert_close(padded.states[name], state, msg=lambda said, what=what: f"{what}: {said}")
        return expected

    steps = list(scheduled(alone.inputs, both, requests, schedule, PAGES, 16, 3))
    assert len(steps) == len(schedule) > 10
