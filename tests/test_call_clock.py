"""How calls are timed: in turns, over inputs that no cache holds, on a GPU behind a head start of the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ingot.compile.timing.call_clock as call_clock
from ingot.compile.timing.call_clock import ROUNDS, time_call
from ingot.ir import build
from ingot.ir.artifact.backend_times import BackendTime, BackendTimes, Candidate, fastest
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType
from ingot.passes.call_bodies import call_body

CPU = Target.detect("cpu")


def product(rows: int = 64, depth: int = 32, tokens: tuple[int, int] = (1, 16), dtype: Any = torch.float32) -> Program:
    program = Program("main", Stage.LOWERED, {"T": Dim("T", 1, tokens[1])})
    program.bucket = BucketClass(name="few", tokens=tokens)
    x = program.add_input("x", TensorType(dtype, ("T", depth)))
    weight = program.add_input("weight", TensorType(dtype, (rows, depth)))
    return call_body(program, build.call(program, OPS["linear"].overload, (x, weight), {}), "call")


class FakeDevice:
    """In place of torch.cuda: `journal` has what was asked of it; a call of backend x takes `seconds[x]`."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.journal, self.now = seconds, list[str](), 0.0
        self.inputs: list[tuple[str, int]] = []

    def sleep(self, cycles: int) -> None:
        self.journal.append("sleep")

    def event(self, *, enable_timing: bool) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)

    def call(self, backend: str) -> Callable[..., None]:
        def run(inputs: Any) -> None:
            self.journal.append(backend)
            self.inputs.append((backend, inputs[1].data_ptr()))
            self.now += self.seconds[backend]

        return run


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.device.journal.append("record")
        self.at = self.device.now

    def synchronize(self) -> None:
        self.device.journal.append("synchronize")

    def elapsed_time(self, other: "FakeEvent") -> float:
        return (other.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    found = FakeDevice({"slow": 3e-5, "swift": 1e-5})
    monkeypatch.setattr(torch.cuda, "_sleep", found.sleep)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.journal.append("empty cache"))
    monkeypatch.setattr(call_clock, "_loaded", lambda candidate, *_: found.call(candidate.backend))
    monkeypatch.setattr(call_clock, "on_one_device", lambda device: None)
    real = call_clock.inputs_for  # the fake device's memory is the host's
    monkeypatch.setattr(call_clock, "inputs_for", lambda body, step, _, generator: real(body, step, "cpu", generator))
    monkeypatch.setattr(torch, "Generator", lambda device: torch._C.Generator("cpu"))
    return found


def test_a_gpu_has_all_launches_before_it_begins(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_clock, "_TRAFFIC", {"cuda": 5 * 4 * (64 * 32 + 9 * 32)})  # five sets of inputs
    gpu = CPU.model_copy(update={"device": "cuda"})
    times = time_call(product(tokens=(2, 16)), [Candidate(backend="slow"), Candidate(backend="swift")], gpu)
    assert times["slow"] == (BackendTime(tokens=9, sequences=9, microseconds=30.0),)
    assert times["swift"] == (BackendTime(tokens=9, sequences=9, microseconds=10.0),)
    rounds = " ".join(device.journal).split("sleep")[1:]
    warm, timed = rounds[: 2 + 2 * 3], rounds[2 + 2 * 3 :]
    assert warm[0] == " record slow record synchronize " and warm[1] == " record swift record synchronize "
    assert len(timed) == 2 * ROUNDS
    for number, one in enumerate(timed):
        name = ("slow", "swift")[number % 2]
        assert one.split()[:-1] == ["record", *[name] * 8, "record"] or one.split() == [
            "record", *[name] * 8, "record", "synchronize", "empty", "cache"
        ]  # fmt: skip
    last = [place for name, place in device.inputs if name == "swift"][-8:]
    assert len(set(last)) == 5 and last[:3] == last[5:], "weights are read from five places in turn"


def test_a_clear_loser_is_timed_by_few_calls(device: FakeDevice) -> None:
    """One that is four times as slow is not called hundreds of times, and has the time that it took."""
    device.seconds = {"slow": 4e-5, "near": 3.9e-5, "swift": 1e-5}
    gpu = CPU.model_copy(update={"device": "cuda"})
    times = time_call(product(tokens=(2, 16)), [Candidate(backend=name) for name in device.seconds], gpu)
    assert {name: one[0].microseconds for name, one in times.items()} == {"slow": 40.0, "near": 39.0, "swift": 10.0}
    calls = {name: device.journal.count(name) for name in device.seconds}
    assert calls["slow"] == 1 + 3 and calls["near"] == calls["swift"] > 50


def test_on_a_cpu_each_backend_runs_on_as_many_threads_as_the_target_has(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    before = torch.get_num_threads()
    monkeypatch.setattr(call_clock, "_loaded", lambda *_: lambda inputs: threads.append(torch.get_num_threads()))
    times = time_call(product(), [Candidate(backend="any")], CPU.model_copy(update={"cores": before + 1}))
    assert set(threads) == {before + 1} and torch.get_num_threads() == before and times["any"][0].microseconds > 0


def test_the_real_clock_tells_fast_from_slow() -> None:
    alone = CPU.model_copy(update={"cores": 1})  # threads that wait for each other on a busy machine are slow, too
    times = time_call(product(512, 512), [Candidate(backend="rowwise"), Candidate(backend="reference")], alone)
    assert 0 < times["reference"][0].microseconds < times["rowwise"][0].microseconds


# --- the choice -------------------------------------------------------------------------------------------------------


def timed(**microseconds: tuple[float, ...]) -> dict[str, tuple[BackendTime, ...]]:
    return {
        name: tuple(BackendTime(tokens=place + 1, sequences=1, microseconds=one) for place, one in enumerate(some))
        for name, some in microseconds.items()
    }


def test_the_fastest_backend() -> None:
    assert fastest(timed(a=(3.0,), b=(2.0,), c=(4.0,))) == "b"
    assert fastest(timed(a=(10.0,), b=(9.9,))) == "a", "what lies within the noise is ranked"
    assert fastest(timed(a=(10.0,), b=(9.7,))) == "b"
    assert fastest(timed(a=(1.0, 110.0), b=(2.0, 100.0))) == "b", "long steps are where the time goes"


def test_times_that_do_not_go_together_are_refused() -> None:
    about: dict[str, Any] = {"call": ("%0 = f()",), "bucket": "any", "source": "measured"}
    assert BackendTimes(**about, backend="a", times=timed(a=(1.0,))).key
    with pytest.raises(ValueError, match="no times of the backend b"):
        BackendTimes(**about, backend="b", times=timed(a=(1.0,)))
    with pytest.raises(ValueError, match="timed in different steps"):
        BackendTimes(**about, backend="a", times=timed(a=(1.0,), b=(1.0, 2.0)))
    with pytest.raises(ValueError, match="timed in different steps"):
        BackendTimes(**about, backend="a", times={"a": ()})
