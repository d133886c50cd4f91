"""Benchmarks leave results in one form; those that are committed keep to it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import ValidationError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # pydantic looks up annotations there
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def results() -> ModuleType:
    if not (BENCHMARKS.parent / ".git").exists():
        pytest.skip("a result names its revision, and this is not a git checkout")
    return module("results")


def test_what_is_written_reads_back(results: ModuleType, tmp_path: Path) -> None:
    figures = {"load": results.Figure(value=0.5, unit="s", what="the least")}
    path = results.write_result("load", {"threads": 2}, figures, folder=tmp_path)
    found = results.read_result(path)
    assert path.name == "load.json" and found.figures == figures and found.settings == {"threads": 2}
    assert found.machine.cores >= 1 and "torch" in found.versions and len(found.revision.rstrip("+")) == 40
    path.write_text(path.read_text().replace('"unit"', '"units"'))
    with pytest.raises(ValidationError, match="units"):
        results.read_result(path)


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results(results: ModuleType, path: Path) -> None:
    assert results.read_result(path).name == path.stem


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["inductor", "reference"])
def test_a_model_of_a_billion_parameters_takes_what_its_plan_says(
    backend: str, results: ModuleType, tmp_path: Path
) -> None:
    """Llama 3.2 1B's shape, with a layer in place of sixteen: they take turns, so the peak is the same."""
    script = [sys.executable, str(BENCHMARKS / "memory.py"), "--layers", "1", "--backend", backend]
    subprocess.run([*script, "--results", str(tmp_path)], check=True, capture_output=True)
    figures = results.read_result(tmp_path / "memory.json").figures
    planned = figures["planned"].value
    assert 0.85 * planned <= figures["activations"].value <= planned
