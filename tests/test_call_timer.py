"""Backends timed against each other: the faster one wins whatever its claim says, once for each machine and code."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lying_backends import Slow, Swift, lying_backends
from sm_90 import unplug

import ingot.compile.compiled_target
from ingot import CompileReport, compile_model
from ingot.cli.main import INGOT, run
from ingot.compile.competing import backend_named
from ingot.compile.emitter import Emitter
from ingot.compile.recorded_request import recorded_request
from ingot.compile.timing.call_clock import time_call
from ingot.compile.timing.call_timer import CallTimer
from ingot.compile.timing.tuning_log import read_log
from ingot.ir import build
from ingot.ir.artifact.backend_times import BackendTime, Candidate
from ingot.ir.artifact.manifest import TUNING
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.tuning import TuningLog
from ingot.ir.errors import BackendError
from ingot.ir.machine.target import Target
from ingot.ir.ops import silu_mul
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType
from ingot.passes.base import Contest
from ingot.passes.call_bodies import call_body
from ingot.runtime.loading.artifact import open_artifact

pytestmark = pytest.mark.one_in_file(3)

NAME = "llama-plain"
OPTIONS: dict[str, Any] = {"target": "cpu", "backend": "reference", "max_batch": 2, "max_tokens": 32, "jobs": 1}
CPU = Target.detect("cpu")
DISTINCT = 3  # calls of three layers in two bucket classes: where prompts are fed, the last layer takes the last rows
Times = Mapping[str, tuple[BackendTime, ...]]


class Clock:
    """Measures in this process, which has the toys, or gives what it is told; `asked` are the calls."""

    def __init__(self, told: Mapping[str, float] | None = None, error: str = "") -> None:
        self.told, self.error, self.asked = told, error, list[Program]()

    def __call__(self, body: Program, candidates: Sequence[Candidate], target: Target) -> Times:
        self.asked.append(body)
        if self.error:
            raise BackendError(self.error)
        if self.told is None:
            return time_call(body, candidates, target)
        step = {"tokens": 1, "sequences": 1}
        return {one.backend: (BackendTime(**step, microseconds=self.told[one.backend]),) for one in candidates}


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    with lying_backends():
        yield


@pytest.fixture
def compile_it(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CompileReport]:
    made: list[Path] = []

    def call(clock: Clock, most: int = 32, **options: Any) -> CompileReport:
        made.append(tmp_path / f"{len(made)}.ingot")
        monkeypatch.setattr(ingot.compile.compiled_target, "CallTimer", partial(CallTimer, measure=clock, most=most))
        return compile_model(checkpoint(NAME), made[-1], **{**OPTIONS, **options})

    return call


def _choices(report: CompileReport) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((report.output / "choices.json").read_text())
    return found


def _backends(report: CompileReport) -> set[str]:
    """Of the calls that are contested, in all bucket classes."""
    programs = _choices(report).values()
    return {program["backends"][node] for program in programs for node in program["contests"]}


def _decisions(report: CompileReport) -> set[tuple[str, str]]:
    contests = [one for program in _choices(report).values() for one in program["contests"].values()]
    assert len(contests) == 6
    return {(one["decided"], one["reason"]) for one in contests}


def _log(report: CompileReport) -> TuningLog:
    return read_log(report.output, CPU)


def test_the_faster_one_wins_and_a_second_compile_times_nothing(
    compile_it: Callable[..., CompileReport], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    first = compile_it(clock)
    assert len(clock.asked) == DISTINCT, "layers repeat"
    assert _backends(first) == {"swift"} and _decisions(first) == {("timed", "")}
    assert Slow.cost < Swift.cost
    for one in _log(first).calls:
        assert one.backend == "swift" and list(one.times) == ["slow", "swift"] and one.source == "measured"
        for slow, swift in zip(one.times["slow"], one.times["swift"], strict=True):
            assert slow.microseconds > 2000 > swift.microseconds and slow.tokens == swift.tokens

    again = compile_it(clock)
    assert (
        len(clock.asked) == DISTINCT and _choices(again) == _choices(first) and again.request_key == first.request_key
    )
    assert (again.output / "program.ir").read_text() == (first.output / "program.ir").read_text()
    assert (again.output / TUNING).read_text() == (first.output / TUNING).read_text()

    assert run(INGOT, ["inspect", str(first.output), "--choices", "--op", "silu_mul"]) == 0
    shown = capsys.readouterr().out
    assert "timed" in shown and "µs of" in shown
    assert run(INGOT, ["inspect", str(first.output), "--choices", "--op", "silu_mul", "--json"]) == 0
    assert {one["decision"]["decided"] for one in json.loads(capsys.readouterr().out)} == {"timed"}
    assert run(INGOT, ["explain", str(first.output), "--op", "silu_mul"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "timed" in shown and "µs of" in shown


def test_times_are_kept_beside_what_was_timed(
    compile_it: Callable[..., CompileReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, clock = compile_it(Clock()), Clock()
    plans = report.plans.plans["main"]
    folder = tmp_path / "cache" / "exe" / plans.libraries["swift"].id
    files = sorted(folder.glob("time-*.json"))
    assert len(files) == DISTINCT and json.loads(files[0].read_text())[0]["microseconds"] > 0
    files[0].write_text("[{}]")
    compile_it(clock)
    assert len(clock.asked) == 1, "what is damaged is timed again"
    monkeypatch.setattr(Swift, "toolchain", lambda self: {"compiler": "another"})
    compile_it(clock)
    assert len(clock.asked) == 1 + DISTINCT, "another executable has other times"


def test_the_request_key_knows_no_times_and_a_log_reproduces_the_choice(
    compile_it: Callable[..., CompileReport], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = compile_it(Clock({"slow": 9.0, "swift": 1.0}))
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "other cache"))
    other = compile_it(Clock({"slow": 1.0, "swift": 9.0}))
    assert one.request_key == other.request_key
    assert (_backends(one), _backends(other)) == ({"swift"}, {"slow"})

    for made in (one, other):
        clock = Clock(error="it was asked")
        again = compile_it(clock, tuning_log=made.output)
        assert not clock.asked and _decisions(again) == {("given", "")} and again.request_key != made.request_key
        assert (again.output / "program.ir").read_text() == (made.output / "program.ir").read_text()
        assert [log.times for log in _log(again).calls] == [log.times for log in _log(made).calls]
        # What compiles an artifact again, to find a fault in it, takes its choices.
        request = recorded_request(open_artifact(made.output))
        assert {one.backend for one in request.decided} == _backends(made)


def test_what_a_given_log_lacks_is_ranked(compile_it: Callable[..., CompileReport]) -> None:
    clock = Clock()
    empty = TuningLog(target="cpu", cores=CPU.cores, choices=()).model_dump(mode="json")
    report = compile_it(clock, tuning_log=empty)
    assert not clock.asked and _backends(report) == {"slow"}
    assert _decisions(report) == {("ranked", "the given log has none")}
    assert not (report.output / TUNING).exists()


def test_a_log_of_a_backend_that_is_not_here(compile_it: Callable[..., CompileReport]) -> None:
    log = json.loads((compile_it(Clock({"slow": 9.0, "swift": 1.0})).output / TUNING).read_text())
    for call in log["calls"]:
        call["backend"] = "away"
        call["times"]["away"] = call["times"].pop("swift")
    report = compile_it(Clock(), tuning_log=log)
    assert _backends(report) == {"slow"}
    assert _decisions(report) == {("ranked", "the given log has away, which does not compute the call here")}


def test_a_call_that_does_not_run_is_ranked(compile_it: Callable[..., CompileReport]) -> None:
    report = compile_it(Clock(error="no memory"))
    assert _backends(report) == {"slow"}
    assert _decisions(report) == {("ranked", "timing failed: no memory")}


def test_so_many_calls_are_timed_and_no_more(compile_it: Callable[..., CompileReport]) -> None:
    reasons = {("timed", ""), ("ranked", "not timed: a compile times 1 different calls")}
    for asked in (1, 0):
        clock = Clock()
        report = compile_it(clock, most=1)
        assert len(clock.asked) == asked and _decisions(report) == reasons, "the second compile comes to the same"


def test_deterministic_mode_counts_batch_invariant_claims_alone(compile_it: Callable[..., CompileReport]) -> None:
    clock = Clock()
    report = compile_it(clock, deterministic=True)
    programs = list(_choices(report).values())
    assert not clock.asked and all(not program["contests"] for program in programs)
    calls = [name for program in programs for name in program["backends"] if name.startswith("silu_mul")]
    assert calls and {program["backends"][name] for program in programs for name in calls} == {"swift"}


def test_nothing_is_timed_for_a_machine_that_is_not_here(compile_it: Callable[..., CompileReport]) -> None:
    asked = Clock()
    compile_it(asked)
    elsewhere = CPU.model_copy(update={"arch": "another"})
    timer = CallTimer(Emitter({}, elsewhere, 1), elsewhere, measure=asked)
    (reason,) = timer.time([Contest(asked.asked[0], ("slow", "swift"))])
    assert isinstance(reason, str) and reason.startswith("not timed: this machine is another target: arch: another")


def test_a_worker_process_times(ingot_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By backends that it knows, and code that a backend built. One that does not run ends in an error."""
    monkeypatch.setenv("INGOT_CACHE", str(ingot_cache))  # which has the library from other tests
    program = Program("main", Stage.LOWERED, {"T": Dim("T", 1, 64)}, bucket=BucketClass(name="any", tokens=(1, 64)))
    gate, up = (program.add_input(name, TensorType(torch.float32, ("T", 64))) for name in ("gate", "up"))
    body = call_body(program, build.call(program, silu_mul.overload, (gate, up), {}), "call")
    cpu, alone = backend_named("cpu", "cpu"), CPU.model_copy(update={"cores": 1})
    with Emitter({"cpu": cpu}, alone, 1) as emitter:
        built = emitter.emit_library(cpu)
        own = Candidate(backend="cpu", executable=built, folder=str(emitter.folders[built.id]))
        times = emitter.time(body, [own, Candidate(backend="rowwise")])
        with pytest.raises(BackendError, match="the library does not load"):
            emitter.time(body, [own.model_copy(update={"folder": "/nowhere"})])
    least = {name: min(one["microseconds"] for one in some) for name, some in times.items()}
    assert set(least) == {"cpu", "rowwise"} and 0 < least["cpu"] < least["rowwise"]


# --- kernels for a GPU, which this machine need not have -------------------------------------------------------------


class Anywhere(CallTimer):
    """It times for machines that are not here, too."""

    def _refusal(self, contest: Contest) -> str:
        return ""


@pytest.mark.slow
def test_products_by_themselves_are_timed_and_those_in_regions_are_not(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms stand behind the products of a layer of OLMo 2, so three of five are in no region of Triton's."""
    unplug(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    clock = Clock({"triton": 9.0, "cublas": 1.0})
    monkeypatch.setattr(ingot.compile.compiled_target, "CallTimer", partial(Anywhere, measure=clock))
    options: dict[str, Any] = {"target": "sm_90", "dtype": "bfloat16", "max_batch": 1, "max_tokens": 1, "jobs": 1}
    report = compile_model(checkpoint("olmo2-cut"), tmp_path / "a.ingot", **options)
    assert len(clock.asked) == 3 and _backends(report) == {"cublas"} and not report.cached_executables
    products = [
        instruction
        for instruction in report.plans.plans["main"].buckets[0].instructions
        if instruction.backend == "cublas"
    ]
    assert {instruction.target for instruction in products} == {"ingot.linear"} and len(products) == 3
    again = compile_model(checkpoint("olmo2-cut"), tmp_path / "b.ingot", **options)
    assert len(clock.asked) == 3 and again.cached_executables == again.distinct_regions
    assert (again.output / "choices.json").read_bytes() == (report.output / "choices.json").read_bytes()
