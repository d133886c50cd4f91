"""One call measures all that there is to measure on a GPU."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from child_script import script_of
from installed import describe


def test_one_call_goes_on_when_a_part_fails(
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    gpu = importlib.import_module("gpu")
    figure = {"value": 2.0, "unit": "s", "what": "something"}
    machine = {"processor": "p", "features": [], "cores": 1, "memory": 1, "system": "s", "load": 0.0}
    answer = {
        "name": "answer",
        "script": "answer.py",
        "revision": "r",
        "date": "2026-01-01",
        "machine": machine,
        "settings": {},
    }
    answer |= {"versions": {"vllm": "1"}, "figures": {"batch_1_step": figure}}
    again = {**answer, "figures": {"compile": figure}}
    works = script_of(tmp_path, f"json.dump({answer!r}, open(sys.argv[-1], 'w'))")
    fails = tmp_path / "fails.py"
    fails.write_text("raise RuntimeError('out of memory')")
    made = [sys.executable, "-c", ""]
    parts = [("checkpoint", [fails, tmp_path]), ("compile", [fails]), ("decode", [works]), ("peer", made)]
    monkeypatch.setattr(gpu, "commands", lambda options: iter(parts))
    monkeypatch.setattr(gpu, "check_commands", lambda: None)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which it puts Ingot in front of, for its parts
    asked = ("gpu", "--shape", "qwen3-0.6b", "--out", tmp_path / "out", "--work", tmp_path / "work")
    call(*asked, "--skip", "peer,serve")
    found = results.read_result(tmp_path / "out" / "gpu_qwen3_0_6b.json")
    assert found.figures["batch_1_step"].value == 2.0 and found.versions["vllm"] == "1"
    assert found.missing.keys() == {"checkpoint", "compile"} and "out of memory" in found.missing["compile"]
    # A later call adds to it, and measures again what is asked for; another commit begins anew.
    parts = [("compile", [script_of(tmp_path, f"json.dump({again!r}, open(sys.argv[-1], 'w'))")])]
    call(*asked)
    found = results.read_result(tmp_path / "out" / "gpu_qwen3_0_6b.json")
    assert found.figures.keys() == {"batch_1_step", "compile"} and found.missing.keys() == {"checkpoint"}
    call(*asked, "--revision", "1" * 40)
    found = results.read_result(tmp_path / "out" / "gpu_qwen3_0_6b.json")
    assert found.figures.keys() == {"compile"} and not found.missing and found.revision == "1" * 40
    # Of a second peer too, which is missing under its own name.
    parts = [("compile", [fails]), ("peer", [fails])]
    call(*asked, "--revision", "1" * 40, "--only", "peer,serve", "--peer", "sglang")
    found = results.read_result(tmp_path / "out" / "gpu_qwen3_0_6b.json")
    assert found.figures.keys() == {"compile"} and found.missing.keys() == {"sglang"}
    call(*asked, "--revision", "1" * 40, "--name", "gpu_of_another_sitting")
    assert results.read_result(tmp_path / "out" / "gpu_of_another_sitting.json").name == "gpu_of_another_sitting"
    # So do other packages: with FlashInfer others compute, and compiling takes longer.
    assert found.versions["flashinfer-python"] != "9.9"
    describe(tmp_path / "site", "flashinfer-python", "9.9")
    monkeypatch.syspath_prepend(tmp_path / "site")
    call(*asked, "--revision", "1" * 40)
    found = results.read_result(tmp_path / "out" / "gpu_qwen3_0_6b.json")
    assert found.versions["flashinfer-python"] == "9.9" and found.missing.keys() == {"compile", "vllm"}
    assert not found.figures
    with pytest.raises(SystemExit, match="no part is left"):
        call(*asked, "--skip", ",".join(gpu.PARTS))
    for wrong, reason in (
        (("--skip", "nothing"), "nothing: choose from checkpoint"),
        (("--skip", "peer", "--only", "serve"), "not allowed with"),
    ):
        with pytest.raises(SystemExit):
            call(*asked, *wrong)
        assert reason in capsys.readouterr().err


def test_parts_are_asked_for_with_options_that_they_have(benchmarks: None, tmp_path: Path) -> None:
    gpu = importlib.import_module("gpu")
    asked = {
        "work": tmp_path,
        "shape": "8b",
        "format": None,
        "checkpoints": None,
        "batch": "1",
        "options": "-x",
        "peer": "sglang",
        "site": tmp_path,
        "peer_caches": None,
        "only": gpu.PARTS,
        "skip": ("serve",),
        "load": "--rate 9",
        "seconds": 900.0,
    }
    commands = dict(gpu.commands(argparse.Namespace(**asked)))
    assert tuple(commands) == gpu.PARTS
    assert commands["serve"][-2:] == ["--rate", "9"] and commands["peer"][-1] == "--no-serve"
    assert dict(gpu.commands(argparse.Namespace(**{**asked, "skip": ()})))["peer"][-2:] == ["--rate", "9"]
    assert "--one-start" not in commands["peer"]
    few = dict(gpu.commands(argparse.Namespace(**{**asked, "only": ("serve", "peer")})))
    assert "--one-start" in few["peer"]
    kept = dict(gpu.commands(argparse.Namespace(**{**asked, "peer_caches": tmp_path})))["peer"]
    assert kept[kept.index("--caches") + 1] == tmp_path
    stored = dict(gpu.commands(argparse.Namespace(**{**asked, "format": "fp8"})))
    assert stored["checkpoint"][2:4] == ["--format", "fp8"] and stored["checkpoint"][-1].parts[-2] == "8b-fp8"
    assert "auto" in stored["peer"] and "auto" not in commands["peer"]
    mixture = dict(
        gpu.commands(argparse.Namespace(**{**asked, "shape": "gpt-oss-20b", "checkpoints": Path("/in/memory")}))
    )
    place = Path("/in/memory/gpt-oss-20b/checkpoint")
    assert "auto" in mixture["peer"] and all(place in mixture[part] for part in ("checkpoint", "compile", "peer"))
    assert mixture["decode"][1] == tmp_path / "gpt-oss-20b" / "model.ingot"
    for part, (script, *arguments) in [*commands.items(), *stored.items(), *mixture.items()]:
        options = [str(argument).partition("=")[0] for argument in arguments if str(argument).startswith("--")]
        known = script.read_text()
        assert all(f'"{option}"' in known for option in options if option != "--rate")
        assert part == "checkpoint" or "add_json_option(parser)" in known
