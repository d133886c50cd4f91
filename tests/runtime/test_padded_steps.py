"""A step filled up to the sizes of a graph computes what it computes alone, and changes nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from run_seed import again, run_seed

from ingot import compile_model
from ingot.ir.numerics.harness import scheduled
from ingot.ir.numerics.tolerances import compare
from ingot.runtime.cuda.graphs import staging
from ingot.runtime.cuda.graphs.staging import HostInputs
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.sequence_pages import one_pool
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.request import Given, Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig
from ingot.runtime.steps.step import StepLayout, StepSizes

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
    host = HostInputs(StepLayout.of(frozenset(alone.inputs)), size)

    def both(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        tokens, rows = len(inputs["tokens"]), len(inputs["rows"])

        def check(name: str, tensor: torch.Tensor, wanted: torch.Tensor) -> None:
            problem = compare(tensor, wanted, wanted.dtype)
            assert problem is None, f"{again((name, tokens, rows))}: {problem}"

        expected = alone.launch(inputs).outputs
        host.fill(inputs)
        views = host.layout.views(host.memory, size)
        found = padded.launch(views).outputs
        for name, value in expected.items():
            check(name, found[name][:tokens], value)
        for name, state in alone.states.items():
            check(name, padded.states[name], state)
        return expected

    steps = list(scheduled(alone.inputs, both, requests, schedule, PAGES, 16, 3))
    assert len(steps) == len(schedule) > 10


def test_what_decode_steps_repeat_is_as_if_filled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one scheduler in turns into two paddings, beside those that are filled for the first time; sequences
    come and go, hold tokens back at first, and take pages."""
    monkeypatch.setattr(staging, "PinnedInts", HostInts)
    draw = random.Random(run_seed())
    config = SchedulerConfig(max_batch=4, max_tokens=32, max_seq_len=64, page_size=4)
    scheduler = Scheduler(config, one_pool(PagePool(64, 4)))
    size = StepSizes(T=32, B=6, L=8, P=20)
    layout = StepLayout.usual()
    sides = [HostInputs(layout, size), HostInputs(layout, size)]
    before, repeated, stamps = None, 0, [None, None]
    for step in range(200):
        if draw.random() < 0.15:
            params = SamplingParams(max_tokens=(most := draw.randint(2, 40)), min_tokens=draw.choice([0, most]))
            prompt = [draw.randrange(100) for _ in range(draw.randint(1, 20))]
            scheduler.add(Request(Given(str(step), prompt, params, eos_ids=frozenset({101})), seed=step))
        batch = scheduler.schedule()
        if batch is not None:
            stamp, held = batch.inputs.stamp, stamps[step % 2]
            repeated += stamp is not None and stamp == held
            stamps[step % 2] = stamp
            anew = HostInputs(layout, size)
            anew.fill(batch.inputs)
            sides[step % 2].fill(batch.inputs)
            pages = batch.inputs.sizes.P  # pages after these are not read
            arrays, filled = (side.layout.views(side.memory, size) for side in (anew, sides[step % 2]))
            for name, array in arrays.items():
                found = filled[name]
                if name == "page_table":
                    array, found = array[: batch.inputs.sizes.B, :pages], found[: batch.inputs.sizes.B, :pages]
                assert (found == array).all(), again((step, name))
        if before is not None:
            scheduler.retire(before, [7] * before.inputs.sizes.L)
        before = batch
    assert repeated > 40
