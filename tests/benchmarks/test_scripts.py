"""The scripts of the benchmarks measure what they say."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, config_of
from drawn import in_one_of

from ingot import SamplingParams
from ingot.bench import children
from ingot.bench.holdings import Holdings
from ingot.bench.soak import Soak
from ingot.bench.soak_load import SoakRequest
from ingot.bench.startup import Start
from ingot.runtime.scheduling.occupancy import Occupancy

pytestmark = pytest.mark.one_in_file(3)


def test_decode(
    artifact: Path,
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    less = ("--long", 44, "--short", 4, "--tries", 3)
    call("decode", artifact, "--batch", "1,3", *less, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    printed = capsys.readouterr().out
    assert "batch 1: " in printed and "of a copy's" in printed
    for batch in (1, 3):
        step, share = figures[f"batch_{batch}_step"].value, figures[f"batch_{batch}_of_copy"].value
        moved = figures[f"batch_{batch}_weights"].value + figures[f"batch_{batch}_cache"].value
        assert 0 < step < 1 and share == pytest.approx(moved / step / figures["copy"].value)
        assert len(figures[f"batch_{batch}_long"].values) == 3
    with pytest.raises(SystemExit, match="64 sequences of 448 tokens are too many"):
        call("decode", artifact, "--batch", "64")


def test_serving(
    artifact: Path, results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    less = ("--prompt", "100,40", "--requests", 6, "--input", 20, "--output", 8)
    arriving = ("--spread", 0, "--arrivals", 5, "--rate", "50,2.5e2")
    sharing = ("--conversation", 64, "--sharing", 3, "--prefix", 32)
    call("serve", artifact, *less, *arriving, *sharing, "--json", tmp_path / "found.json")
    found = results.read_result(tmp_path / "found.json")
    figures = found.figures
    assert (found.settings["rate"], found.settings["prompt"]) == ("50,250", "100,40")
    for part in ("arrivals_50", "arrivals_250", "prefix"):
        for name in ("ttft", "tpot"):
            mean, high = (figures[f"{part}_{name}{which}"].value for which in ("", "_p99"))
            assert 0 < mean <= high * (1 + 1e-12) < 30  # all may be equal, and a mean of equal numbers is rounded
    assert figures["arrivals_50_ttft"].what.startswith("5 requests like ShareGPT's, 50 of them a second: ")
    # The last one arrives at 5 / 50 s, and that run cannot end before.
    assert 0 < figures["arrivals_50_goodput"].value <= 50 and 0 < figures["arrivals_250_goodput"].value <= 250
    for prompt in (figures["prompt_100"], figures["prompt_40"]):
        assert 0 < prompt.value == min(prompt.values) and len(prompt.values) == 3
    assert (
        figures["prefix_throughput"].value > 10
        and figures["throughput"].value > 10
        and figures["throughput"].unit == "tokens/s"
    )
    with pytest.raises(SystemExit, match="sequences of 256 tokens, not of 4001"):
        call("serve", artifact)
    none = [item for name in ("prompt", "requests", "spread", "arrivals", "sharing") for item in (f"--{name}", 0)]
    call("serve", artifact, *none, "--json", tmp_path / "found.json")
    assert results.read_result(tmp_path / "found.json").figures == {}


def test_what_a_step_costs_the_host(
    results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    """The script itself asserts who runs, who waits, and what is found."""
    call("schedule", "--running", 4, "--waiting", 3, "--prompt", 40, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    parts = {f"{part}{how}" for part in ("schedule", "retire") for how in ("", "_uncached", "_none_waiting")}
    assert figures.keys() == {*parts, "add", "admit"}
    assert all(0 < figure.value < 0.1 for figure in figures.values())


def test_what_a_step_costs_the_engine(
    results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    """The script itself asserts that all requests ended."""
    call("engine_host", "--running", 4, "--prompt", 20, "--output", 24, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    cases = ("alone", "streamed", "sampled", "text", "streamed_text", "logprobs", "stops", "served")
    assert figures.keys() == {f"{part}_{case}" for part in ("step", "add", "admit") for case in cases}
    assert all(0 < figure.value < 0.1 for figure in figures.values())


@pytest.mark.slow
def test_an_engine_that_is_killed(
    artifact: Path, results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    call("engine_restart", artifact, "--requests", 2, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    assert figures["failed"].value == 2
    assert 0 < figures["not_ready"].value < figures["ready"].value < figures["answered"].value


@in_one_of(3)
def test_a_cold_start(
    artifact: Path, results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    call("cold_start", artifact, "--tries", 1, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    total = figures["first_token"]
    phases = [figures[f"first_token_{name}"].value for name in ("start", "import", "load", "prompt")]
    assert all(phase > 0 for phase in phases) and sum(phases) == pytest.approx(total.value)
    assert total.values == (total.value,) and total.value < 60
    loading = [figure.value for name, figure in figures.items() if name.startswith("load_")]
    assert loading and max(loading) <= figures["first_token_load"].value
    memory = {name: figures[f"start_{name}"].value for name in ("memory", "anonymous", "shared", "pinned", "locked")}
    assert 50e6 < memory["anonymous"] <= memory["memory"] < 4e9, "torch's own is some 200 MB"
    assert memory["memory"] == memory["anonymous"] + memory["shared"] + memory["pinned"]
    assert figures["artifact"].value == sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file())


def test_the_memory_of_starts_is_that_of_the_largest(benchmarks: None) -> None:
    cold_start, samples = (importlib.import_module(name) for name in ("cold_start", "process_samples"))
    starts = [Start(1.0, {}, {}, pinned=pinned) for pinned in (1, 40)]
    peaks = [samples.PeakMemory(700, 600, 20, 3), samples.PeakMemory(500, 500, 30, 5)]
    found = {name: (one.value, one.values) for name, one in cold_start.memory_figures(starts, peaks).items()}
    assert found == {
        "start_memory": (721, (721, 570)),
        "start_anonymous": (700, (700, 500)),
        "start_shared": (30, (20, 30)),
        "start_pinned": (40, (1, 40)),
        "start_locked": (5, (3, 5)),
    }


@in_one_of(3)
def test_a_soak(
    artifact: Path, results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    less = ("--minutes", 0.01, "--warm-up", 0.001, "--probes", 2, "--pages", 40, "--rate", 10)
    call("soak", artifact, *less, "--json", tmp_path / "found.json")
    found = results.read_result(tmp_path / "found.json")
    value = {name: figure.value for name, figure in found.figures.items()}
    assert value["requests"] == 6 and value["probes"] == 2 >= value["probes_equal"]
    assert value["tokens"] > 100 and 1 <= value["running"] <= 4 and 0 < value["wait_p99_first"] < 60
    for name in ("errors", "unended", "pages", "pages_kept", "fds", "objects"):
        assert value[name] == 0
    assert found.settings["rate"] == 10 and not found.settings["deterministic"]
    with pytest.raises(SystemExit, match="--minutes is 0"):
        call("soak", artifact, "--minutes", 0)


def test_what_a_soak_fails_for(benchmarks: None) -> None:
    soak = importlib.import_module("soak")
    idle = Occupancy(0, 0, 0, 4, 0, 0, 7, 9, 0)
    held = Holdings(10**8, 10**9, 5, 40, idle)
    probe = SoakRequest((1,), SamplingParams(temperature=0.0), probe=0)
    done = Soak([probe, replace(probe, probe=1)])
    for outcome in done.outcomes:
        outcome.ended, outcome.token_ids = "length", (3, 4)
    fine = soak.Soaked(done, alone=((3, 4), (3, 4)), before=held, after=held, kept=0, deterministic=True)
    assert list(soak.failures(fine)) == [] and fine.equal == 2
    other = replace(fine, alone=((3, 4), (4, 3)))
    assert list(soak.failures(replace(other, deterministic=False))) == [] and other.equal == 1
    grown = {"anonymous": 2 * 10**8, "device": 2 * 10**9, "fds": 6, "objects": 41}
    busy = {"waiting": 1, "running": 1, "steps": 1, "pages_held": 1, "pages_releasing": 1, "free_rows": 3}
    wrong = [
        other,
        replace(fine, kept=1),
        *(replace(fine, after=replace(held, **{name: size})) for name, size in grown.items()),
        *(replace(fine, after=replace(held, occupancy=replace(idle, **{name: size}))) for name, size in busy.items()),
    ]
    for one in wrong:
        assert len(list(soak.failures(one))) == 1
    done.outcomes[0].fault, done.outcomes[1].ended = "broke", ""
    assert list(soak.failures(fine)) == ["request 0 broke", "1 requests never ended"]


def test_copies_of_weights(
    artifact: Path, results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    options = ("--device", "cpu", "--threads", "1,3", "--repeats", 1, "--json", tmp_path / "found.json")
    call("copy_weights", artifact, *options)
    figures = results.read_result(tmp_path / "found.json").figures
    assert figures.keys() == {f"{way}_{threads}" for way in ("copy", "nohash", "hash", "read") for threads in (1, 3)}
    assert all(figure.value > 0 and figure.unit == "B/s" for figure in figures.values())


def test_compiles_are_timed_with_the_caches_that_they_are_named_by(
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With a compile of our own, which takes a second a layer and finds executables in its cache."""
    compile_time, checkpoints = (importlib.import_module(name) for name in ("compile_time", "random_checkpoint"))
    commands = []

    def run_command(command: Any, *, env: dict[str, str], **_: Any) -> Any:
        checkpoint, output, cache = command[4], command[6], Path(env["INGOT_CACHE"])
        commands.append(list(map(str, command[7:])))
        layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
        seconds = 0.5 if cache.exists() else float(layers)
        assert {Path(env[name]).parent for name in compile_time.CACHES} == {cache.parent}
        cache.mkdir(parents=True, exist_ok=True)
        output.mkdir()
        (output / "timings.json").write_text(json.dumps({"phases": {"golden run": 0.25}}))
        return children.Ended(0.0, seconds, None)

    checkpoint = checkpoints.write_checkpoint(tmp_path / "checkpoint", config_of("1b", num_hidden_layers=6))
    monkeypatch.setattr(compile_time, "run_command", run_command)
    compiling = (checkpoint, "--work", tmp_path / "work", "--layers", 2, "--options", "--max-seq-len 64")
    for _ in range(2):  # what an earlier run left does not count
        call("compile_time", *compiling, "--json", tmp_path / "found.json")
        figures = results.read_result(tmp_path / "found.json").figures
        names = ("compile", "compile_cached", "compile_few", "compile_per_few", "compile_golden_run")
        assert [figures[name].value for name in names] == [6.0, 0.5, 2.0, 3.0, 0.25]
    assert commands == [["--max-seq-len", "64"]] * 6
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["cache", "model.ingot"]


def test_the_memory_of_children_is_that_of_grandchildren_too() -> None:
    """A child and its own child each hold 64 MiB of pages that they have written, and 16 MiB that could be shared.

    Another process measures them, since this one may have other children.
    """
    held = 64 << 20
    hold = f"import mmap, subprocess, sys, time; kept = b'x' * {held}; block = mmap.mmap(-1, {held // 4}); "
    hold += f"block.write(b'x' * {held // 4}); "
    both = f"{hold}subprocess.run([sys.executable, '-c', {hold + 'time.sleep(0.4)'!r}], check=True)"
    measure = f"""
import json, subprocess, sys
from process_samples import children_memory
with children_memory() as peak:
    subprocess.run([sys.executable, "-c", {both!r}], check=True)
print(json.dumps([peak.together, peak.largest, peak.shared, peak.locked]))
"""
    path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", measure], cwd=BENCHMARKS, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    together, largest, shared, locked = json.loads(done.stdout)
    assert held <= largest < 2 * held <= together < 3 * held
    assert held // 2 <= shared < held and locked == 0


def test_compiles_with_a_package_take_turns(
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With a compile of our own, slower with the package, which wins three calls of two programs there."""
    script = importlib.import_module("compile_with_package")
    seconds = iter([9.0, 11.0, 8.0, 12.0])
    sites: list[str | None] = []

    def run_command(command: Any, *, env: dict[str, str] | None = None, **_: Any) -> Any:
        if "pip" in command:
            assert (Path(command[-1]) / "pyproject.toml").is_file() and "--no-deps" in command
            return children.Ended(0.0, 1.0, None)
        assert env is not None and not Path(env["INGOT_CACHE"]).exists(), "caches are empty"
        Path(env["INGOT_CACHE"]).mkdir(parents=True)
        output, outside = command[6], "PYTHONPATH" in env
        sites.append(env.get("PYTHONPATH"))
        output.mkdir()
        taken = {"a": "cpu", "b": "c_gates" if outside else "inductor"}
        programs = {"decode": {"backends": {**taken, "c": taken["b"]}}, "extend": {"backends": taken}}
        (output / "choices.json").write_text(json.dumps(programs))
        return children.Ended(0.0, next(seconds), None)

    monkeypatch.setattr(script, "run_command", run_command)
    used = iter([0.0, 20.0, 0.0, 21.0, 0.0, 22.0, 0.0, 20.5])
    monkeypatch.setattr(script, "_cpu_seconds", lambda: next(used))
    call("compile_with_package", tmp_path, "--work", tmp_path / "work", "--turns", 2, "--json", tmp_path / "found.json")
    site = str(tmp_path / "work" / "site")
    assert sites == [None, site, None, site]
    figures = results.read_result(tmp_path / "found.json").figures
    assert {name: one.value for name, one in figures.items()} == {
        "compile_wall": 8.0,
        "compile_with_package_wall": 11.0,
        "wall_ratio": 11 / 8,
        "compile_cpu": 20.0,
        "compile_with_package_cpu": 20.5,
        "cpu_ratio": 20.5 / 20,
        "won": 3.0,
    }
    assert figures["compile_with_package_wall"].values == (11.0, 12.0)


def test_the_gpu_part_of_a_fat_artifact_is_measured_in_turns(
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With a compile and a decode of our own. The fat artifact takes 2 % longer in its better turn, with one log."""
    script = importlib.import_module("fat_artifact")
    work = tmp_path / "work"
    compiled: list[tuple[str, bool]] = []
    measured: list[str] = []

    def run_command(command: list[Any], *, env: dict[str, str], **_: Any) -> children.Ended:
        output: Path = command[6]
        compiled.append((output.stem, env.get("CUDA_VISIBLE_DEVICES") == ""))
        assert ("--tune" in command) == (output.stem == "single") and "--max-batch" in command
        if output.stem == "fat":
            assert command[command.index("--tuning-log") + 1] == str(work / "single.ingot")
        for name, size in (("weights/0.safetensors", 1000), ("exe/region.so", 10)):
            (output / name).parent.mkdir(parents=True)
            (output / name).write_bytes(bytes(size))
        return children.Ended(0.0, 1.0, None)

    steps = iter([1.0, 1.03, 1.5, 1.1, 1.02, 1.4])

    def run_child(command: list[Any], **_: Any) -> children.Ended:
        measured.append(command[1].stem)
        step = results.Figure(value=next(steps), unit="s", what="a step", values=(1.0,))
        path = results.write_result(script.__file__, "decode", {}, {"batch_8_step": step}, folder=tmp_path)
        return children.Ended(0.0, 1.0, json.loads(path.read_text(encoding="utf-8")))

    monkeypatch.setattr(script, "run_command", run_command)
    monkeypatch.setattr(script, "run_child", run_child)
    asked = (tmp_path, "--work", work, "--batch", "8", "--targets", "cpu,sm_90", "--json", tmp_path / "found.json")
    call("fat_artifact", *asked)
    assert compiled == [("single", False), ("fat", True), ("untuned", True)]
    assert measured == ["single", "fat", "untuned"] * 2
    figures = results.read_result(tmp_path / "found.json").figures
    assert figures["fat_batch_8"].values == (1.03, 1.02)
    assert figures["fat_batch_8_ratio"].value == 1.02 and figures["untuned_batch_8_ratio"].value == 1.4
    assert (figures["fat_size"].value, figures["fat_weights"].value) == (1010, 1000)
    with pytest.raises(SystemExit, match="lacks --gpu sm_80"):
        call("fat_artifact", *asked, "--gpu", "sm_80")


@in_one_of(3)
def test_an_export_is_measured(
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    export, checkpoints = (importlib.import_module(name) for name in ("export", "random_checkpoint"))

    def write_tiny(folder: Path, config: Any) -> Path:
        tiny = config_of("1b", num_hidden_layers=config["num_hidden_layers"])
        return checkpoints.write_checkpoint(folder, tiny)  # type: ignore[no-any-return]

    monkeypatch.setattr(export, "write_checkpoint", write_tiny)
    work = tmp_path / "work"
    work.mkdir()
    call("export", "--layers", 2, "--to", "safetensors", "--work", work, "--json", tmp_path / "found.json")
    found = results.read_result(tmp_path / "found.json")
    figures = {name: figure.value for name, figure in found.figures.items()}
    assert found.settings["layers"] == 2 and list(work.iterdir()) == []
    assert 0 < figures["safetensors"] < 300
    assert figures["safetensors_share"] == figures["safetensors_peak"] / figures["safetensors_weights"]
    # The weights of two layers and the embedding in two bytes, and the table of the rotation in four.
    tiny = config_of("1b", num_hidden_layers=2)
    stored = 2 * sum(math.prod(shape) for shape in checkpoints.tensor_shapes(tiny).values())
    stored += 4 * tiny["max_position_embeddings"] * tiny["head_dim"]
    assert stored <= figures["safetensors_weights"] < 1.01 * stored + 10_000
    with pytest.raises(SystemExit):
        call("export", "--to", "gguf")


def test_traces_are_timed_by_depth(
    results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    call("trace_time", "--shape", "8b", "--layers", "3,1", "--tries", 2, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    assert figures.keys() == {"first", "trace_1", "trace_3", "peak"}
    assert all(figure.value > 0 for figure in figures.values()) and len(figures["trace_3"].values) == 2


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_is_timed_in_a_browser(
    results: ModuleType, call: Callable[..., None], committed: None, artifact: Path, tmp_path: Path
) -> None:
    call("first_paint", artifact, "--tries", 2, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    assert 0 < figures["first_paint"].value < figures["usable"].value and len(figures["usable"].values) == 2


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
