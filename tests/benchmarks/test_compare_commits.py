"""Two commits are compared in turns, each by its own code; a bar that is missed is told."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FAKE_CHECKOUT = Path(__file__).parents[1] / "support" / "outside" / "fake_checkout"
LOAD = ("--batch", "1,2", "--long", 40, "--short", 10, "--prompt", 20, "--requests", 4, "--input", 8, "--output", 5)


@pytest.fixture
def compared(benchmarks: None) -> ModuleType:
    return importlib.import_module("compared")


@pytest.fixture
def compare(call: Callable[..., None], tmp_path: Path) -> Callable[..., Any]:
    """Compares two fake checkouts, whose tokens take so many milliseconds; what the call wrote, and how it ended."""
    (tmp_path / "shape").mkdir(exist_ok=True)

    def run(old: str, new: str, *arguments: object) -> tuple[dict[str, Any], str]:
        for side, text in (("old", old), ("new", new)):
            checkout(tmp_path / side, text)
        where = ("--checkpoint", tmp_path / "shape", "--work", tmp_path / "work", "--out", tmp_path / "found.json")
        ended = ""
        if "host" not in arguments:  # that needs none
            (tmp_path / "shape" / "config.json").write_text('{"vocab_size": 100}')
        try:
            call("compare_commits", tmp_path / "old", tmp_path / "new", *where, *LOAD, *arguments)
        except SystemExit as error:
            ended = str(error)
        found = tmp_path / "found.json"
        return json.loads(found.read_text()) if found.exists() else {}, ended

    return run


def checkout(folder: Path, text: str) -> None:
    """The fake one, with a line that says how it behaves."""
    for path in FAKE_CHECKOUT.rglob("*.py"):
        to = folder / path.relative_to(FAKE_CHECKOUT)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(path.read_text())
    (folder / "ingot" / "behaviour.py").write_text(text)


def test_both_sides_are_measured_in_turns_by_their_own_code(
    compare: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, ended = compare("MS = 1", "MS = 4", "--rounds", 2, "--second", 2)
    samples = {name: {side: len(values) for side, values in sides.items()} for name, sides in found["samples"].items()}
    twice = {"old": 2, "new": 2}
    rounds = (
        "first_token",
        "context",
        "phase_context",
        "first_token_less_context",
        "import",
        "load",
        "throughput",
        "prompt_20",
    )
    measured = (
        "compile_cached",
        *rounds,
        "batch_1_step",
        "batch_2_step",
        "host_alone",
        "host_streamed",
        "host_sampled",
    )
    assert samples == {"compile": {"old": 1, "new": 1}, **dict.fromkeys(measured, twice)}
    verdicts = found["verdicts"]
    for name in ("batch_1_step", "prompt_20", "throughput", "host_alone", "compile"):
        assert not verdicts[name]["holds"] and verdicts[name]["ratio"] > 1.5
        assert name in found["missed"] and f"missed: {name}" in ended
    assert verdicts["first_token"]["holds"] is None and "first_token" not in found["missed"]
    printed = capsys.readouterr().out
    order = [" ".join(line.split(",")[0].split()[::2]) for line in printed.splitlines() if line.startswith("round ")]
    assert order == ["round old", "round new", "round new", "round old"]
    assert "MISSED 1.02 ×" in printed
    assert (tmp_path / "work" / "shape" / "old" / "cache").is_dir()  # of its own


def test_a_later_call_adds_samples_unless_the_sources_are_others(compare: Callable[..., Any]) -> None:
    compare("MS = 2", "MS = 2", "--rounds", 1, "--only", "host")
    found, _ = compare("MS = 2", "MS = 2", "--rounds", 1, "--only", "compile")
    assert {"compile", "host_alone"} <= found["samples"].keys()
    found, _ = compare("MS = 2", "MS = 2", "--rounds", 2, "--only", "host")
    assert len(found["samples"]["host_alone"]["new"]) == 3
    found, _ = compare("MS = 2", "MS = 2  # otherwise", "--rounds", 1, "--only", "host")
    assert found["samples"].keys() == {"host_alone", "host_streamed", "host_sampled"}


def test_what_fails_or_finds_no_time_is_told_and_the_rest_is_measured(compare: Callable[..., Any]) -> None:
    found, ended = compare("MS = 1", "MS = 1; raise RuntimeError('out of memory')", "--rounds", 1, "--only", "compile")
    assert found["samples"]["compile"]["new"] == [] and "compile" in found["missed"]
    assert "compile, new: compile_time.py ended with status 1: RuntimeError: out of memory" in ended
    _, ended = compare("MS = 1", "MS = 1", "--only", "compile", "--seconds", 0)
    assert "compile, sample 1 of 1, old: no time was left" in ended


def test_what_is_no_checkout_or_was_not_compiled_is_refused(compare: Callable[..., Any], tmp_path: Path) -> None:
    _, ended = compare("MS = 1", "MS = 1", "--only", "decode")
    assert ended == f"{tmp_path / 'work' / 'shape' / 'old' / 'model.ingot'} is missing: name `compile` in --only first"
    with pytest.raises(SystemExit, match="is not a checkout of Ingot"):
        importlib.import_module("compare_commits").check_sides(
            [importlib.import_module("compare_commits").Side("old", tmp_path, tmp_path)], ("compile",)
        )


def test_another_ingot_than_the_checkout_s_is_not_measured(
    compare: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare("MS = 1", "MS = 1", "--only", "compile")
    commits = importlib.import_module("compare_commits")
    side = commits.Side("old", tmp_path / "old", tmp_path / "work" / "shape" / "old")
    elsewhere = commits.Side("new", tmp_path / "new", side.work)
    monkeypatch.setattr(commits.Side, "env", elsewhere.env)
    with pytest.raises(commits.SampleError, match=r"Ingot was imported from .*new, not from .*old"):
        commits.round_sample(["--vocab", 100], side, 60.0)


def test_a_bar_holds_within_its_limit_and_the_spread(compared: ModuleType) -> None:
    step, rate, told = compared.bar_of("batch_32_step"), compared.bar_of("throughput"), compared.bar_of("import")
    steady = [1.0, 1.0, 1.0, 1.0, 1.0]
    assert compared.verdict(step, steady, [1.02] * 5).holds
    assert not compared.verdict(step, steady, [1.021] * 5).holds
    wide = [0.98, 0.99, 1.0, 1.01, 1.5]  # one that other work delayed does not count
    found = compared.verdict(step, wide, [1.039] * 5)
    assert found.spread == pytest.approx(0.02) and found.holds
    assert not compared.verdict(step, wide, [1.041] * 5).holds
    assert compared.verdict(rate, [100.0], [90.0]).ratio == pytest.approx(10 / 9)
    assert compared.verdict(rate, [100.0], [110.0]).holds and compared.verdict(told, [1.0], [9.0]).holds is None
    assert compared.bar_of("compile").limit == 1.1 and compared.bar_of("compile_cached").limit == 1.02
