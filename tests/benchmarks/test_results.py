"""Benchmarks leave their figures in one form, in units for readers; results that are committed keep to it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import BENCHMARKS
from pydantic import ValidationError

from ingot.bench.machine import PACKAGES


def test_what_is_written_reads_back(results: ModuleType, committed: None, tmp_path: Path) -> None:
    figures = {"load": results.Figure(value=0.5, unit="s", what="the least", values=(0.5, 0.75))}
    path = results.write_result(str(BENCHMARKS / "load.py"), "load", {"threads": 2}, figures, folder=tmp_path)
    found = results.read_result(path)
    assert (
        path.name == "load.json"
        and found.script == "load.py"
        and found.figures == figures
        and found.settings == {"threads": 2}
    )
    assert found.machine.cores >= 1 and len(found.revision.rstrip("+")) == 40
    assert found.versions.keys() == {"python", *PACKAGES} and "flashinfer-python" in PACKAGES
    path.write_text(path.read_text().replace('"unit"', '"units"'))
    with pytest.raises(ValidationError, match="units"):
        results.read_result(path)


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results(results: ModuleType, path: Path) -> None:
    found = results.read_result(path)
    assert found.name == path.stem and (BENCHMARKS / found.script).is_file()


def test_a_copy_without_git_names_its_commit(results: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", Path("/"))
    monkeypatch.delenv("INGOT_REVISION", raising=False)
    with pytest.raises(SystemExit, match="INGOT_REVISION"):
        results.revision()
    monkeypatch.setenv("INGOT_REVISION", "abc")
    assert results.revision() == "abc"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.000755, "s", "755 µs"),
        (0.0009999, "s", "1.00 ms"),
        (86.24, "s", "86.2 s"),
        (0.9999, "s", "1.00 s"),
        (3.274e12, "B/s", "3.27 TB/s"),
        (12.0, "B", "12.0 B"),
        (36512.3, "tokens/s", "36,512 tokens/s"),
        (1.6543, "", "1.65"),
        (0.00003, "", "0.00"),
        (0.0, "s", "0 s"),
    ],
)
def test_numbers_are_written_for_readers(benchmarks: None, value: float, unit: str, text: str) -> None:
    assert importlib.import_module("units").quantity(value, unit) == text
