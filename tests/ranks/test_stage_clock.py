"""The clock of a stage on a GPU: what it counts, in steps without graphs and in replays. Events are recorded here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.ir.artifact.plan import BucketClass, BucketMemory, BucketPlan, Instruction, Ref, Transfer, Transfers, Value
from ingot.ir.machine.load_context import Communicator
from ingot.runtime.cuda.stage_clock import StageClock
from ingot.runtime.cuda.staged_bucket import StagedBucket
from ingot.runtime.steps.stage_line import StageLine

CPU = torch.device("cpu")


class Gpu:
    """Time that passes only when something runs, in milliseconds."""

    now = 0.0
    capturing = False


class Event:
    def __init__(self, gpu: Gpu, external: bool) -> None:
        self.gpu, self.external, self.time = gpu, external, float("nan")

    def record(self) -> None:
        assert self.external is self.gpu.capturing, "a plain event is no node of a graph"
        self.time = self.gpu.now

    def query(self) -> bool:
        return self.time == self.time

    def elapsed_time(self, other: Event) -> float:
        return other.time - self.time


class Slow(Communicator):
    """Another stage: moving a value takes 100 ms."""

    def __init__(self, gpu: Gpu, place: int) -> None:
        self.gpu, self.place, self.size = gpu, place, 2

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("stages do not gather")

    def send(self, x: torch.Tensor, place: int) -> None:
        self.gpu.now += 100

    def receive(self, into: torch.Tensor, place: int) -> None:
        self.gpu.now += 100
        into.zero_()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing, external: Event(made, external))
    return made


def staged(gpu: Gpu, clock: StageClock | None) -> StagedBucket:
    """The last stage of two: its model takes 3 ms, and its ending 2 ms."""

    def taking(milliseconds: float) -> Any:
        def run(x: torch.Tensor) -> list[torch.Tensor]:
            gpu.now += milliseconds
            return [x + 1]

        return run

    def call(name: str, given: str, result: str) -> Instruction:
        return Instruction(target=f"exe.{name}", backend="triton", args=(Ref(ref=given),), results=(result,))

    plan = BucketPlan(
        bucket=BucketClass(name="any", tokens=(1, 8)),
        instructions=(call("model", "x", "y"), call("sample", "y", "token")),
        values={
            name: Value(type="f32[T]", buffer="received" if name == "x" else "pool") for name in ("x", "y", "token")
        },
        memory=BucketMemory(sizes={}, activations=0, peak=0),
        ending=1,
        transfers=Transfers(received=(Transfer(name="x", stage=0),), sent=(Transfer(name="token", stage=0),)),
    )
    executables = {"model": taking(3), "sample": taking(2)}
    options: Any = {"resident": {}, "inputs": [], "outputs": ["token"], "executables": executables, "libraries": {}}
    return StagedBucket(plan, line=StageLine(Slow(gpu, 1), CPU), clock=clock, **options)


def test_waits_for_other_stages_do_not_count(gpu: Gpu) -> None:
    clock = StageClock(CPU)
    bucket = staged(gpu, clock)
    for steps in (1, 2):
        assert bucket.run({}, {"T": 2})["token"].tolist() == [2.0, 2.0]
        assert clock.busy == steps * 5_000_000 and gpu.now == steps * 205


def test_a_part_counts_when_it_is_complete(gpu: Gpu) -> None:
    clock = StageClock(CPU)
    part = clock.begin()
    gpu.now += 4
    assert clock.busy == 0
    clock.end(part)
    assert clock.busy == 4_000_000 == clock.busy, "once"


def test_a_graph_counts_each_replay(gpu: Gpu) -> None:
    """Its events are nodes of it, so each replay records them again."""
    clock = StageClock(CPU)
    bucket = staged(gpu, clock)
    gpu.capturing = True
    bucket.run({}, {"T": 1})
    gpu.capturing = False
    complete = bucket.captured()
    assert clock.busy == 0, "a capture computes nothing"
    complete()
    complete()
    assert clock.busy == 2 * 5_000_000
    bucket.captured()()
    assert clock.busy == 2 * 5_000_000, "the parts of the graph before are not counted again"


def test_without_a_clock_nothing_is_recorded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", None)
    bucket = staged(gpu, None)
    bucket.run({}, {"T": 1})
    bucket.captured()()
