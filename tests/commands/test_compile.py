"""`compile-model`: its progress and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_world import LIMITS, Command, World

import ingot.cli.main as cli
from ingot.ir.artifact.plan import PlanFile

pytestmark = pytest.mark.xdist_group("cli")


def test_an_artifact_for_a_mesh_is_inspected_and_runs_on_it_alone(world: World, ingot: Command, tmp_path: Path) -> None:
    path = tmp_path / "two.ingot"
    compiled = ingot("compile", world.checkpoint, "-o", path, "--backend", "reference", "--mesh", "tp=2", *LIMITS)
    assert compiled.code == cli.DONE and f"\nNext:  ingot run {path} " in compiled.out
    assert ingot("verify", path).code == cli.DONE
    weights = ingot("inspect", path, "--weights").out
    assert "weights/rank0/00000.safetensors@" in weights and "weights/rank1/00000.safetensors@" in weights
    assert "mesh tp=2" in ingot("inspect", path).out
    done = ingot("run", path, "--prompt-ids", "5", "--tensor-parallel-size", "3")
    assert (
        done.code == cli.BAD_INPUT and "tensor_parallel_size is 3, and the artifact was compiled for tp=2" in done.err
    )
    assert '--mesh "tp=3"' in done.err
    for mesh, problem in (("tp=3", "do not divide among 3 ranks"), ("tp", "like tp=2"), ("ep=2", "unknown mesh axis")):
        refused = ingot("compile", world.checkpoint, "-o", tmp_path / "no", "--backend", "reference", "--mesh", mesh)
        assert refused.code == cli.BAD_INPUT and problem in refused.err


def test_compiling_tells_its_progress_and_reports(world: World) -> None:
    assert world.compiled.err.splitlines() == [
        f"ingot: {phase}"
        for phase in ("start", "trace", "identify", "passes and executables", "weights", "write", "golden run")
    ]
    report = world.compiled.out
    assert report.startswith(f"\nCompiled {world.artifact} in ")
    for line in (
        "trace",
        "weights",
        "write",
        "regions",
        "nodes per backend  reference ",
        "artifact",
        "build id",
        "Memory",
    ):
        assert f"\n{line}" in report
    assert "0 calls of 0 distinct executables" in report
    assert f"Next:  ingot run '{world.artifact}' \"…\"" in report


def test_without_a_tokenizer_the_report_suggests_token_ids(
    world: World, ingot: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ingot.compile.driver as compiler

    def compiled(checkpoint: str, output: str, **_: object) -> compiler.CompileReport:
        plans = PlanFile.model_validate_json((world.artifact / "plan.json").read_text()).of(0)
        return compiler.CompileReport(Path(output), "b", "r", {"trace": 1.0}, 6, 2, 1, {"inductor": 6}, 7, 1500, plans)

    monkeypatch.setattr(compiler, "compile_model", compiled)
    done = ingot("compile", world.checkpoint, "-o", tmp_path / "a.ingot")
    assert done.code == 0
    assert "6 calls of 2 distinct executables, 1 from the cache" in done.out and "1.5 kB" in done.out
    assert f"Next:  ingot run {tmp_path}/a.ingot --prompt-ids 1,2,3" in done.out


def test_what_is_left_aside_is_told_in_a_line_each(world: World, ingot: Command, tmp_path: Path) -> None:
    config = json.loads((world.checkpoint / "config.json").read_text())
    more = {"remark": "mine", "lora_alpha": 16, "auto_map": {"AutoModelForCausalLM": "modeling_my.Mine"}}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({**config, **more}))
    (tmp_path / "mine" / "model.safetensors").symlink_to(world.checkpoint / "model.safetensors")
    done = ingot("compile", tmp_path / "mine", "-o", tmp_path / "a.ingot", "--backend", "reference", *LIMITS)
    assert done.code == cli.DONE
    assert [line for line in done.out.splitlines() if line.startswith("warning: ")] == [
        "warning: fields of config.json that no definition knows, and that are not read: lora_alpha, remark",
        "warning: code that the checkpoint brings, and that is not run: modeling_my.py",
    ]
    assert "warning" not in world.compiled.out


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ingot.cli.progress import live_progress

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with live_progress() as progress:
        progress("trace", 0, 0)
        for done in range(4):
            progress("weights", done, 3)
    drawn = capsys.readouterr()
    assert "trace" in drawn.err and "3/3" in drawn.err and drawn.err.count("✓") >= 2
    assert drawn.out == ""


def test_progress_in_a_log_is_sparse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import ingot.cli.progress as module

    now = iter([0.0, 1.0, 7.0, 8.0, 13.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with module.live_progress() as progress:
        for done in range(5):
            progress("weights", done, 900)
    assert capsys.readouterr().err.splitlines() == [
        "ingot: weights",
        "ingot: weights, 2 of 900",
        "ingot: weights, 4 of 900",
    ]


def test_progress_in_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import ingot.cli.progress as progress_module
    from ingot.cli.console import ByteCount

    def download() -> str:
        with progress_module.live_progress() as progress:
            for done in range(0, 3_000_000_001, 1_000_000_000):
                progress("download", ByteCount(done), ByteCount(3_000_000_000))
        return capsys.readouterr().err

    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_LINES", 0.0)
    assert download() == "ingot: download\n"  # quiet in a pipe, however long it takes
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "3.0 GB/3.0 GB" in download()
