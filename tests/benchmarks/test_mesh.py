"""The comparison of artifacts for meshes with one for a device: in turns, by name, as medians of rounds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("mesh")


def run(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[str], Any, Any]:
    """Run the script. A step takes 8, 7, 6, … s, and the throughput is 100, 110, … tokens/s."""
    measured: list[str] = []
    reported: list[Any] = []

    def run_child(path: Path, settings: Any) -> Any:
        count = len(measured)
        measured.append(path.name)
        return {
            "step": mesh.Figure(value=8.0 - count, unit="s", what="a step"),
            "throughput": mesh.Figure(value=100.0 + 10 * count, unit="tokens/s", what="requests"),
        }

    monkeypatch.setattr(mesh, "run_child", run_child)
    monkeypatch.setattr(mesh, "report", lambda *given: reported.append(given))
    monkeypatch.setattr(sys, "argv", ["mesh.py", *arguments])
    mesh.main()
    ((script, _, settings, figures),) = reported
    assert script == mesh.__file__
    return measured, settings, figures


def test_one_mesh(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, settings, figures = run(mesh, monkeypatch, "a.ingot", "b.ingot")
    assert measured == ["a.ingot", "b.ingot"] and (settings["one"], settings["mesh"]) == ("a.ingot", "b.ingot")
    assert figures["mesh.step.faster"].value == 8 / 7 and figures["mesh.throughput.faster"].value == 110 / 100
    assert figures["one.step"].what == "one device: a step" and figures["mesh.step"].what == "the mesh: a step"


def test_several_in_turns(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, settings, figures = run(mesh, monkeypatch, "a.ingot", "nccl.ingot", "peer.ingot", "--rounds", "2")
    assert measured == ["a.ingot", "nccl.ingot", "peer.ingot"] * 2
    assert settings["peer"] == "peer.ingot" and settings["rounds"] == 2
    assert (figures["peer.step"].value, figures["peer.step"].values) == (4.5, (6.0, 3.0))
    assert figures["nccl.step.faster"].value == 6.5 / 5.5


def test_equal_names_are_refused(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="two artifacts have one name"):
        run(mesh, monkeypatch, "a.ingot", "b/x.ingot", "c/x.ingot")
