"""Steps are timed without being changed, and their shares reckoned by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ingot.bench.drive import drive
from ingot.bench.engine import open_engine
from ingot.bench.steps import StepTimes, WatchedExecutor, step_metrics
from ingot.bench.workload import Lengths, make_workload
from ingot.runtime.steps.step import StepBuffer, StepInputs, StepLayout, StepSizes

pytestmark = pytest.mark.xdist_group("parity-llama-plain")  # the artifact that the parity tests compile too


class SlowHandle:
    def tokens(self) -> list[int]:
        time.sleep(0.02)
        return [7]

    def rejected(self) -> list[int]:
        return [2, 0]

    def logprobs(self) -> str:
        return "logprobs"


class SlowExecutor:
    def launch(self, inputs: StepInputs) -> SlowHandle:
        time.sleep(0.01)
        return SlowHandle()


def test_a_watched_step_is_the_step() -> None:
    watched = WatchedExecutor(SlowExecutor())  # type: ignore[arg-type]  # its log-probabilities are none
    inputs = StepBuffer(StepLayout.usual(), StepSizes(8, 8, 8, 1)).views(StepSizes(3, 3, 3, 1))
    first = watched.launch(inputs)
    prompt = StepBuffer(StepLayout.usual(), StepSizes(8, 8, 8, 1)).views(StepSizes(5, 2, 2, 1))
    second = watched.launch(prompt)
    assert watched.steps == [] and first.logprobs() == "logprobs" and first.rejected() == [2, 0]
    assert first.tokens() == second.tokens() == second.tokens() == [7]
    one, two = watched.steps
    assert (one.sequences, one.decode, two.sequences, two.decode) == (3, True, 2, False)
    assert (one.after_decode, two.after_decode) == (False, True)
    assert 0.01 <= one.launch < 5 and 0.02 <= one.wait < 5 and one.device is None


def test_shares() -> None:
    steps = [
        StepTimes(9, False, 0.5, 0.5, device=1.0),
        StepTimes(4, True, 0.1, 0.2, device=0.5, since=0.75),  # behind a prompt's step
        StepTimes(4, True, 0.1, 0.2, device=0.5, since=0.75, after_decode=True),
        StepTimes(2, True, 0.1, 0.0, device=2.0, since=0.25, after_decode=True),  # launched before it could begin
        StepTimes(2, True, 0.1, 0.1, device=0.5),
    ]
    found = step_metrics(steps, 4.0)
    assert found["steps"] == 5 and found["decode_steps"] == 4 and found["mean_decode_sequences"] == 3
    assert found["launch_share"] == pytest.approx(0.225) and found["wait_share"] == pytest.approx(0.25)
    assert found["host_share"] == pytest.approx(1 - 0.475) and found["device_seconds"] == 4.5
    assert found["decode_idle_share"] == 1 - (0.5 + 0.25) / (0.75 + 0.25)
    assert step_metrics(steps[:1], 4.0)["decode_idle_share"] is None
    assert step_metrics([StepTimes(1, True, 0.5, 0.0)], 4.0)["device_seconds"] is None


def test_an_artifact_is_asked_for_what_it_can_take(artifact: Callable[..., Path]) -> None:
    engine = open_engine(artifact("llama-plain", backend="reference"))
    ends = set(engine.engine._eos_ids)
    assert ends and set(engine.tokens) == set(range(engine.limits.vocab_size)) - ends
    asked = make_workload([Lengths(20, 5), Lengths(9, 3), Lengths(30, 1)], engine.tokens, 0)
    run = drive(engine, asked)
    assert [len(one.token_times) for one in run.records] == [5, 3, 1] and len(run.completed) == 3
    assert all(one.token_times == sorted(one.token_times) for one in run.records)
    # A step makes one token of each sequence: the longest output took as many steps as it has tokens.
    assert [one.decode for one in engine.executor.steps] == [False, *[True] * 4]
    assert all(one.after_decode == (index > 1) for index, one in enumerate(engine.executor.steps))
    assert sum(one.launch + one.wait for one in engine.executor.steps) < run.duration


class SleepingGpu:
    """Steps that keep a GPU's stream busy for some ten million cycles, a few milliseconds, and do nothing else."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def launch(self, inputs: StepInputs) -> SleepingStep:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(10_000_000)
            return SleepingStep(self.stream.record_event())


@dataclass(frozen=True)
class SleepingStep:
    done: torch.cuda.Event

    def tokens(self) -> list[int]:
        self.done.synchronize()
        return []


@pytest.mark.gpu
@pytest.mark.parametrize(("pause", "least", "most"), [(0.0, 0.0, 0.2), (0.1, 0.5, 1.0)])
def test_a_gpu_that_waits_for_the_host_is_idle(pause: float, least: float, most: float) -> None:
    """As an engine does it: a step is launched before the tokens of the one before are asked for."""
    gpu = SleepingGpu()
    watched = WatchedExecutor(gpu, gpu.stream)  # type: ignore[arg-type]  # it gives no log-probabilities
    inputs = StepBuffer(StepLayout.usual(), StepSizes(8, 8, 8, 1)).views(StepSizes(3, 3, 3, 1))
    watched.launch(inputs).tokens()  # starts the GPU up
    watched.steps.clear()
    begin = time.perf_counter()
    before = watched.launch(inputs)
    for _ in range(12):
        time.sleep(pause)
        after = watched.launch(inputs)
        before.tokens()
        before = after
    before.tokens()
    seconds = time.perf_counter() - begin
    found = step_metrics(watched.steps, seconds)
    assert found["steps"] == found["decode_steps"] == 13
    device, idle = found["device_seconds"], found["decode_idle_share"]
    assert device is not None and 0.01 < device <= seconds * 1.01
    assert idle is not None and least <= idle <= most
