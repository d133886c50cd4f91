"""What the tuner asks for, what it keeps, and for whom; on a backend whose kernels have one size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from backend_kinds import CompilesCalls

from ingot.backends.reference.emit import Reference
from ingot.compile.timing.tuner import Tuner
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import Tunable
from ingot.ir.errors import OutputError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Region, Stage

SM_90 = Target.named("sm_90")


class Sized(CompilesCalls, Reference):
    """Has a kernel of some size for each region, by the region's name; kernels of `fixed` regions cannot be tried."""

    name = "sized"

    def __init__(
        self, given: Sequence[Choice] = (), compiler: str = "1", fixed: str = "", method: Path | None = None
    ) -> None:
        self.given, self.compiler, self.fixed = {choice.key: choice for choice in given}, compiler, fixed
        self.method = method

    def choices(self, body: Program, target: Target) -> tuple[Choice, ...]:
        known = Choice(kernel="square", problem={"name": body.name}, tiles={"side": 1}, source="heuristic")
        return (self.given.get(known.key, known),)

    def with_choices(self, choices: Sequence[Choice]) -> "Sized":
        return Sized((*self.given.values(), *choices), self.compiler, self.fixed, self.method)

    def measures(self, choice: Choice) -> bool:
        return choice.problem["name"] != self.fixed

    def measure(self, choice: Choice, target: Target, seconds: float) -> Choice:
        raise AssertionError("the tests measure by themselves")

    def tuning_sources(self) -> list[Path]:
        return [] if self.method is None else [self.method]

    def toolchain(self) -> dict[str, str]:
        return {"compiler": self.compiler}


@dataclass
class Clock:
    """In place of a GPU: the size 7 is the fastest for all."""

    asked: list[str]

    def __call__(self, backend: str, choice: Choice, seconds: float) -> Choice:
        assert backend == "sized" and seconds == 0.5
        self.asked.append(str(choice.problem["name"]))
        return choice.model_copy(update={"tiles": {"side": 7}, "microseconds": 2.0, "source": "measured"})


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    return tmp_path


def tune(names: str, backend: Sized | None = None, target: Target = SM_90, clock: Any = None) -> tuple[str, list[int]]:
    """What was measured for regions of these names, and the sizes that they then have."""
    backend, clock = backend or Sized(), clock or Clock([])
    regions = [Region(name, Program(name, Stage.LOWERED, {}), "sized") for name in names]
    regions.append(Region("other", Program("other", Stage.LOWERED, {}), "reference"))
    with Tuner(target, seconds=0.5, measure=clock) as tuner:
        backends = tuner.tuned({"sized": backend, "reference": Reference()}, regions)
    tuned = backends["sized"]
    assert isinstance(tuned, Tunable) and not isinstance(backends["reference"], Tunable)
    return "".join(clock.asked), [tuned.choices(one.body, target)[0].tiles["side"] for one in regions[:-1]]


def test_each_problem_is_timed_once() -> None:
    assert tune("aab") == ("ab", [7, 7, 7])
    assert tune("abc") == ("c", [7, 7, 7]), "the cache has the others"


def test_what_was_given_and_what_has_one_size_is_not_timed() -> None:
    given = Choice(kernel="square", problem={"name": "a"}, tiles={"side": 3}, source="given")
    assert tune("abc", Sized([given], fixed="b")) == ("c", [3, 1, 7])


def test_times_are_of_one_gpu_and_one_compiler() -> None:
    assert tune("a")[0] == "a"
    assert tune("a", target=SM_90.model_copy(update={"gpu": "another product"}))[0] == "a"
    assert tune("a", target=SM_90.model_copy(update={"cores": 1}))[0] == "a"
    assert tune("a", Sized(compiler="2"))[0] == "a"
    assert tune("a", target=SM_90.model_copy(update={"memory": 1}))[0] == ""


def test_times_are_of_one_method(tmp_path: Path) -> None:
    """A change of how sizes are timed makes cached results stale, though it changes no compiled code."""
    method = tmp_path / "method.py"
    method.write_text("alone")
    assert tune("a", Sized(method=method)) == ("a", [7])
    assert tune("a", Sized(method=method)) == ("", [7])
    method.write_text("between matmuls")
    assert tune("a", Sized(method=method)) == ("a", [7])


def test_damaged_times_are_taken_again(cache: Path) -> None:
    tune("ab")
    first, second = sorted((cache / "tuning").glob("*.json"))
    text = first.read_text()
    first.write_text(second.read_text())
    second.write_text(text[:20])
    assert sorted(tune("ab")[0]) == ["a", "b"]
    assert tune("ab") == ("", [7, 7])


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match="the disk is full"):
        tune("a")
