"""Captured graphs and dependent launches change nothing: steps are bitwise those of single launches, one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_table import patch_entry
from gpu_model import LIMITS, MODEL

from ingot import compile_model
from ingot.backends.triton import load as triton
from ingot.ir.numerics.harness import scheduled
from ingot.runtime.loading.loader import Loaded, load_artifact

pytestmark = pytest.mark.gpu
REPLAYS = 10_000
DECODED = 100  # tokens of each sequence; a run is begun anew until there are enough replays
BATCHES = (1, 5, 32, 80)  # of the last one products are cuBLAS's, which rounds by the size: it fills its graph


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replays")
    output = folder / "a.ingot"
    compile_model(MODEL.write(folder / "checkpoint"), output, target="cuda", dtype="bfloat16", **LIMITS)
    return output


def _steps(loaded: Loaded, count: int, delay: bool) -> Iterator[Mapping[str, torch.Tensor]]:
    """Logits and tokens of every decode step of `count` sequences fed the same random tokens each time."""
    draw = random.Random(count)
    requests = [[draw.randrange(512) for _ in range(DECODED)] for _ in range(count)]
    executor: Any = loaded.executor

    def run(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if delay and draw.random() < 0.2:
            with torch.cuda.stream(loaded.context.stream):
                torch.cuda._sleep(draw.randrange(1, 400_000))  # cycles: up to a fifth of a millisecond
        return {name: value.cpu() for name, value in executor.launch(inputs).outputs.items()}

    schedule = [[(index, 1) for index in range(count)] for _ in range(DECODED)]
    pages = count * -(-DECODED // loaded.limits.page_size)
    yield from scheduled(executor.inputs, run, requests, schedule, pages, loaded.limits.page_size, 3)


def _digest(step: Mapping[str, torch.Tensor]) -> bytes:
    return step["logits"].contiguous().view(torch.uint8).numpy().tobytes() + step["tokens"].numpy().tobytes()


@pytest.mark.parametrize("count", BATCHES)
def test_replays_give_the_same_bits_as_single_launches(count: int, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = load_artifact(made)
    patch_entry(monkeypatch, "triton", executable=partial(triton.load, dependent=False))
    plain = load_artifact(made, capture="none")
    expected = [_digest(step) for step in _steps(plain, count, delay=False)]
    replays = REPLAYS // len(BATCHES)
    for round_number in range(-(-replays // DECODED)):
        for number, step in enumerate(_steps(served, count, delay=True)):
            assert _digest(step) == expected[number], f"round {round_number}, step {number}"
    assert served.executor.captured.decode, "no graph was captured"
