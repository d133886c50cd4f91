"""Artifacts for meshes next to one for a device, and next to a peer: in turns, by name, as medians of rounds."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS

from ingot.bench.children import ChildError
from ingot.runtime.loading.phases import Span

pytestmark = pytest.mark.one_in_file(3)

FAKE_PEERS = Path(__file__).parents[1] / "support" / "outside" / "fake_peers"


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch, committed: None) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("mesh")


class Measured(list[str]):
    """The artifacts that were measured, in order. A step takes 8, 7, 6, … s; the throughput is 100, 110, … tokens/s."""

    def __init__(self, mesh: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        def figure(value: float, unit: str, what: str) -> Any:
            return mesh.Figure(value=value, unit=unit, what=what)

        def run_child(path: Path, settings: Any) -> Any:
            count = len(self)
            self.append(path.name)
            return {
                "step": figure(8.0 - count, "s", "a step"),
                "throughput": figure(100.0 + 10 * count, "tokens/s", "requests"),
                **({"load.rank1.bind": figure(0.5, "s", "of rank 1")} if path.name != "a.ingot" else {}),
            }

        def starts(path: Path, tries: int) -> Any:
            return {"start": figure(5.0, "s", f"the least of {tries}")}

        def run_peer(options: Any, tensor_parallel: int) -> Any:
            self.append(f"peer {tensor_parallel}")
            return {"peer.step": figure(14.0, "s", "vLLM 1.2, tp=2: a step")}, {"vllm": "1.2"}

        for name, function in (("run_child", run_child), ("starts", starts), ("run_peer", run_peer)):
            monkeypatch.setattr(mesh, name, function)
        monkeypatch.setattr(mesh, "mesh_in", lambda path: "" if path.name == "a.ingot" else "tp=2")


def run(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch, file: Path, *arguments: str) -> tuple[list[str], Any]:
    measured = Measured(mesh, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["mesh.py", *arguments, "--json", str(file)])
    mesh.main()
    return measured, mesh.read_result(file)


def test_one_mesh(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured, result = run(mesh, monkeypatch, tmp_path / "m.json", "a.ingot", "b.ingot")
    figures, settings = result.figures, result.settings
    assert measured == ["a.ingot", "b.ingot"] and (settings["one"], settings["mesh"]) == ("a.ingot", "b.ingot")
    assert figures["mesh.step.faster"].value == 8 / 7 and figures["mesh.throughput.faster"].value == 110 / 100
    assert figures["one.step"].what == "one device: a step" and figures["mesh.step"].what == "the mesh: a step"
    assert figures["mesh.start.faster"].value == 1 and figures["one.start"].what == "one device: the least of 3"
    assert "mesh.load.rank1.bind" in figures and "mesh.load.rank1.bind.faster" not in figures


def test_several_in_turns(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("a.ingot", "nccl.ingot", "peer_memory.ingot", "--rounds", "2")
    measured, result = run(mesh, monkeypatch, tmp_path / "m.json", *arguments)
    assert measured == ["a.ingot", "nccl.ingot", "peer_memory.ingot"] * 2
    figures, settings = result.figures, result.settings
    assert settings["peer_memory"] == "peer_memory.ingot" and settings["rounds"] == 2
    assert (figures["peer_memory.step"].value, figures["peer_memory.step"].values) == (4.5, (6.0, 3.0))
    assert figures["nccl.step.faster"].value == 6.5 / 5.5


@pytest.mark.parametrize("names", [("b/x.ingot", "c/x.ingot"), ("x.ingot", "one.ingot"), ("x.ingot", "peer.ingot")])
def test_equal_names_are_refused(
    names: tuple[str, str], mesh: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="two artifacts have one name"):
        run(mesh, monkeypatch, tmp_path / "m.json", "a.ingot", *names)


def test_a_peer_beside_and_parts_in_several_calls(
    mesh: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each call measures a part, and keeps the figures of the others. Ratios are those of all figures."""
    file, arguments = tmp_path / "m.json", ("a.ingot", "b.ingot", "--peer-site", "p", "--checkpoint", "c")
    assert run(mesh, monkeypatch, file, *arguments, "--only", "one")[0] == ["a.ingot"]
    assert run(mesh, monkeypatch, file, *arguments, "--only", "mesh")[0] == ["b.ingot"]
    measured, result = run(mesh, monkeypatch, file, *arguments, "--only", "peer")
    assert measured == ["peer 2"] and result.versions["vllm"] == "1.2" and result.settings["peer"] == "vLLM"
    figures = result.figures
    assert figures["mesh.step"].value == figures["one.step"].value == 8 and figures["mesh.step.faster"].value == 1
    assert figures["mesh.step.than_peer"].value == 14 / 8
    assert figures["mesh.step.than_peer"].what == "the mesh: a step, faster than vLLM by"
    assert "one.step.than_peer" not in figures, "it has as many GPUs as the mesh"
    monkeypatch.setenv("INGOT_REVISION", "1" * 40)
    assert not [name for name in run(mesh, monkeypatch, file, *arguments, "--only", "one")[1].figures if "mesh" in name]
    with pytest.raises(SystemExit, match="--only names two: choose from one, mesh, peer"):
        run(mesh, monkeypatch, file, *arguments, "--only", "two")


def test_half_a_peer_is_refused(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(mesh, monkeypatch, tmp_path / "m.json", "a.ingot", "b.ingot", "--peer-site", "p")


def test_vllm_on_as_many_gpus(mesh: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By peer.py, with multicast off: the package in place of vLLM checks both. It makes a token in a millisecond."""
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    options = argparse.Namespace(
        checkpoint=tmp_path,
        peer_site=FAKE_PEERS,
        peer_caches=None,
        batch="1",
        prompt=100,
        requests=4,
        input=16,
        output=20,
    )
    figures, versions = mesh.run_peer(options, 2)
    assert versions == {"vllm": "0.0.1"}
    assert figures.keys() == {"peer.batch_1_step", "peer.first_token", "peer.throughput", "peer.start"}
    assert figures["peer.batch_1_step"].value == pytest.approx(1e-3, rel=0.5)
    assert figures["peer.first_token"].what.startswith("vLLM 0.0.1, tp=2: the first token after a prompt of 100")
    options.peer_caches = tmp_path / "caches"
    asked: list[str] = []

    def no_child(command: list[str | Path], **_: object) -> None:
        asked.extend(map(str, command))
        raise ChildError("told to fail")

    monkeypatch.setattr(mesh, "run_command", no_child)
    with pytest.raises(SystemExit, match="vLLM was not measured: told to fail"):
        mesh.run_peer(options, 2)
    assert asked[asked.index("--caches") + 1] == str(tmp_path / "caches")


def test_phases_of_each_rank(mesh: ModuleType) -> None:
    """Those that take long, with their beginning after the first one; a phase in two parts is added up."""
    zero = (Span("engine", 1.5, 3.5), Span("plan", 3.5, 3.55), Span("graph", 6.0, 7.0), Span("graph", 8.0, 8.5))
    llm = SimpleNamespace(timeline={0: zero, 1: (Span("rank 0", 4.0, 4.25),)})
    found = mesh.phases(llm)
    assert {name: figure.value for name, figure in found.items()} == {
        "load.rank0.engine": 2.0,
        "load.rank0.graph": 1.5,
        "load.rank1.rank_0": 0.25,
    }
    assert found["load.rank0.graph"].what == "loading: graph of rank 0, which began after 4.50 s"


def test_a_peer_that_has_no_ranks(call: Callable[..., None], benchmarks: None, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="SGLang is measured on one GPU only"):
        call("peer", tmp_path, "--peer", "sglang", "--site", FAKE_PEERS, "--tensor-parallel", 2)
