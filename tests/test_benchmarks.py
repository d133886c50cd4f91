"""Benchmarks measure what they say, and leave it in one form; results that are committed keep to it."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from child_script import script_of
from pydantic import ValidationError
from safetensors import safe_open
from staged import BACKENDS, LIMITS, staged, traced

from ingot import SamplingParams, compile_model
from ingot.bench import children
from ingot.bench.drive import Progress
from ingot.bench.holdings import Holdings
from ingot.bench.soak import Soak
from ingot.bench.soak_load import SoakRequest
from ingot.bench.workload import BenchRequest
from ingot.ir.plan import Plans
from ingot.ir.program import Program
from ingot.ir.target import Target
from ingot.passes.pipeline import PIPELINE
from ingot.providers import competing
from ingot.runtime.occupancy import Occupancy

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = {path.stem for path in BENCHMARKS.glob("*.py")}


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """The scripts of the folder, importable by their bare names, as they import one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def results(benchmarks: None) -> ModuleType:
    return importlib.import_module("results")


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that results can name, in checkouts without git too."""
    monkeypatch.setenv("INGOT_REVISION", "0" * 40)


@pytest.fixture
def call(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a script in this process, which has imported torch already."""

    def run(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        importlib.import_module(name).main()

    return run


def config_of(shape: str, **changes: Any) -> dict[str, Any]:
    """A shape of the benchmarks, made tiny."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoints = importlib.import_module("random_checkpoint")
    found: dict[str, Any] = checkpoints.config_of(
        shape, **{**sizes, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 512, **changes}
    )
    return found


@pytest.fixture(scope="module")
def artifact(benchmarks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, compiled for the reference backend."""
    folder = tmp_path_factory.mktemp("benchmarks")
    write = importlib.import_module("random_checkpoint").write_checkpoint
    checkpoint = write(folder / "checkpoint", config_of("1b"))
    compile_model(checkpoint, folder / "tiny.ingot", backend="reference", max_seq_len=256, max_batch=4)
    return folder / "tiny.ingot"


def test_what_is_written_reads_back(results: ModuleType, committed: None, tmp_path: Path) -> None:
    figures = {"load": results.Figure(value=0.5, unit="s", what="the least", values=(0.5, 0.75))}
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


@pytest.mark.parametrize(("shape", "parameters"), [("1b", 1235814400), ("8b", 8030261248), ("qwen3-0.6b", 596049920)])
def test_shapes_have_the_published_number_of_parameters(benchmarks: None, shape: str, parameters: int) -> None:
    """The model cards' 1.23 B, 8.03 B and 0.6 B, as the metadata of their safetensors say exactly."""
    checkpoints = importlib.import_module("random_checkpoint")
    assert sum(map(math.prod, checkpoints.tensor_shapes(checkpoints.SHAPES[shape]).values())) == parameters


@pytest.mark.parametrize("shape", ["1b", "8b", "qwen3-0.6b"])
def test_a_checkpoint_is_sane_and_the_same_again(
    benchmarks: None, shape: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = importlib.import_module("random_checkpoint")
    config = config_of(shape, vocab_size=2048)
    whole = tensors_of(checkpoints.write_checkpoint(tmp_path / "whole", config))
    monkeypatch.setattr(checkpoints, "_SHARD_BYTES", 50_000)
    shards = tensors_of(checkpoints.write_checkpoint(tmp_path / "shards", config))
    other = tensors_of(checkpoints.write_checkpoint(tmp_path / "other", config, seed=1))
    assert whole.keys() == shards.keys() and len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for name, tensor in whole.items():
        assert tensor.equal(shards[name])
        if tensor.dim() == 2:
            assert tensor.float().std().item() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.05)
            assert not tensor.equal(other[name])
    matrices = [tensor for tensor in whole.values() if tensor.dim() == 2]
    assert not any(a.shape == b.shape and a.equal(b) for a in matrices for b in matrices if a is not b)
    traced(json.loads((tmp_path / "whole" / "config.json").read_text()))


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["weight_map"].keys() == found.keys()
    return found


@pytest.mark.parametrize("way", ["calls", "regions", "gpu"])
@pytest.mark.parametrize("shape", ["1b", "8b", "qwen3-0.6b"])
def test_the_bytes_of_a_step(benchmarks: None, shape: str, way: str) -> None:
    """Against the sizes of the checkpoint's tensors, and the cache's size by hand; a layer of Qwen 3 has a window."""
    checkpoints = importlib.import_module("random_checkpoint")
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    config = config_of(shape, **(window if shape == "qwen3-0.6b" else {}))
    program = lowered(config, way)
    assert bool(program.regions) == (way != "calls")
    found = importlib.import_module("traffic").program_traffic(program, 3, 40.5)
    read = dict(checkpoints.tensor_shapes(config))
    if "lm_head.weight" in read:
        del read["model.embed_tokens.weight"]  # of which a step reads three rows
    assert found.weights == 2 * sum(map(math.prod, read.values()))
    position = 2 * 2 * 16 * 2  # keys and values of two heads of 16, in bfloat16
    seen = 40.5 + (24 if shape == "qwen3-0.6b" else 40.5)
    assert found.cache == 3 * (seen + 2) * position
    assert found.bytes == found.weights + found.cache


def lowered(config: dict[str, Any], way: str) -> Program:
    """The program in front of its plan: for a CPU in single calls or with regions, or for a GPU, which fuses more."""
    target, limits = Target.detect("cpu"), LIMITS
    backends = BACKENDS if way == "regions" else BACKENDS[1:]
    if way == "gpu":
        pytest.importorskip("triton")
        target, limits = Target.named("sm_90"), replace(LIMITS, max_tokens=16)  # a class of decode steps
        backends = competing("auto", target)
    return staged(traced(config, limits), PIPELINE[:-1], limits, backends=backends, target=target)[0][-1].program


def test_the_traffic_of_an_artifact_is_what_its_plan_counts(artifact: Path, benchmarks: None) -> None:
    found = importlib.import_module("traffic").step_traffic(artifact, 2, 16 - 1)
    plan = Plans.model_validate_json((artifact / "plan.json").read_text()).plans["main"]
    assert found.cache == 2 * plan.memory.page  # a page holds 16 positions of all layers
    tables = plan.memory.weights - found.weights
    assert tables == 256 * 16 * 4  # the rotary table in f32, of which a step reads two rows


def test_a_step_is_timed_by_what_longer_outputs_take_more(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own: a request costs 5 s and a token a quarter, and the first of each length is slow."""
    method = importlib.import_module("decode_method")
    now = 0.0
    asked: list[tuple[int, int]] = []

    def generate(prompts: list[list[int]], count: int) -> None:
        nonlocal now
        assert all(len(prompt) == 128 and all(0 <= token < 50 for token in prompt) for prompt in prompts)
        now += 5 + count / 4 + (3 if (len(prompts), count) not in asked else 0)
        asked.append((len(prompts), count))

    monkeypatch.setattr(method.time, "perf_counter", lambda: now)
    lengths = method.Lengths(long=40, short=20, tries=2)
    decoded = method.measure_decode(generate, 50, 3, lengths)
    assert decoded.step == 0.25 and decoded.long == (18.0, 15.0)
    assert asked == [(3, 16), (3, 20), (3, 20), (3, 40), (3, 40)]
    # The token n of an output is made by a step that sees the prompt and the n - 1 tokens in front of it.
    seen = [128 + n - 1 for n in range(20 + 1, 40 + 1)]
    assert lengths.context == sum(seen) / len(seen) and lengths.tokens == 168


def test_what_a_busy_machine_gives_is_no_step(benchmarks: None) -> None:
    method = importlib.import_module("decode_method")
    with pytest.raises(SystemExit, match="too busy"):
        slow_first = iter([0, 0.1, 0])
        method.measure_decode(lambda *_: time.sleep(next(slow_first)), 50, 1, method.Lengths(long=2, short=1, tries=1))


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
            assert 0 < figures[f"{part}_{name}"].value <= figures[f"{part}_{name}_p99"].value < 30
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
    with pytest.raises(SystemExit, match="sequences of 256 tokens, and not of 4001"):
        call("serve", artifact)
    none = [item for name in ("prompt", "requests", "spread", "arrivals", "sharing") for item in (f"--{name}", 0)]
    call("serve", artifact, *none, "--json", tmp_path / "found.json")
    assert results.read_result(tmp_path / "found.json").figures == {}


def test_no_two_prompts_begin_alike_where_they_need_not(benchmarks: None) -> None:
    """Or a cache of prefixes would answer for the engine."""
    method = importlib.import_module("serve_method")
    asked: list[tuple[int, ...]] = []

    class Engine:
        def __init__(self) -> None:
            self.open: list[tuple[int, int]] = []

        def add(self, index: int, request: Any) -> None:
            self.open.append((index, request.output_len))
            asked.append(request.prompt)

        def has_unfinished(self) -> bool:
            return bool(self.open)

        def step(self) -> list[Progress]:
            done, self.open = self.open, []
            return [Progress(index, count, True) for index, count in done]

    load = method.Load(prompt=(300, 700), requests=4, arrivals=5, rate=(1e4, 2e4), spread=3, sharing=2, prefix=90)
    engine = Engine()
    method.measure_serving(engine, engine, 1000, load)
    # Four of each long prompt, and each of the other parts after as many that warm up.
    assert len(asked) == 2 * 4 + 2 * (4 + 3 + 5 + 5 + 2)
    sharing = asked[-4:]
    assert sharing[0][:90] == sharing[1][:90] != sharing[2][:90] == sharing[3][:90]
    beginnings = [prompt[:4] for prompt in asked[:-4]] + [sharing[0][:4], sharing[2][:4]]
    assert len(set(beginnings)) == len(beginnings)


def test_what_a_step_costs_the_host(
    results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    """The script itself asserts who runs, who waits, and what is found."""
    call("schedule", "--running", 4, "--waiting", 3, "--prompt", 40, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    parts = {f"{part}{how}" for part in ("schedule", "retire") for how in ("", "_uncached", "_nobody_waits")}
    assert figures.keys() == {*parts, "add", "admit"}
    assert all(0 < figure.value < 0.1 for figure in figures.values())


def test_what_a_step_costs_the_engine(
    results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    """The script itself asserts that all requests ended."""
    call("engine_host", "--running", 4, "--prompt", 20, "--output", 24, "--json", tmp_path / "found.json")
    figures = results.read_result(tmp_path / "found.json").figures
    cases = ("alone", "streamed", "sampled", "text", "streamed_text", "logprobs", "stops")
    assert figures.keys() == {f"{part}_{case}" for part in ("step", "add", "admit") for case in cases}
    assert all(0 < figure.value < 0.1 for figure in figures.values())


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


def test_copies_of_weights(
    artifact: Path, results: ModuleType, call: Callable[..., None], committed: None, tmp_path: Path
) -> None:
    options = ("--device", "cpu", "--threads", "1,3", "--repeats", 1, "--json", tmp_path / "found.json")
    call("copy_weights", artifact, *options)
    figures = results.read_result(tmp_path / "found.json").figures
    assert figures.keys() == {f"{way}_{threads}" for way in ("copy", "nohash", "hash", "read") for threads in (1, 3)}
    assert all(figure.value > 0 and figure.unit == "B/s" for figure in figures.values())


# Holds packages with the peers' names: a token takes them a millisecond, and their first start 0.4 s more.
FAKE_PEERS = Path(__file__).parent / "support" / "fake_peers"


@pytest.mark.parametrize(("name", "version", "title"), [("vllm", "0.0.1", "vLLM"), ("sglang", "0.0.2", "SGLang")])
def test_a_peer(
    name: str,
    version: str,
    title: str,
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    asked = ("peer", tmp_path, "--peer", name, "--site")
    less = ("--long", 60, "--short", 20, "--tries", 3)
    load = ("--prompt", 5000, "--requests", 8, "--input", 128, "--output", 20)
    arriving = ("--spread", 1, "--arrivals", 12, "--rate", 100, "--conversation", 64, "--sharing", 3, "--prefix", 64)
    call(*asked, FAKE_PEERS, *less, *load, *arriving, "--json", tmp_path / "found.json")
    found = results.read_result(tmp_path / "found.json")
    assert found.versions[name] == version
    figures = {key.removeprefix(f"{name}_"): figure for key, figure in found.figures.items()}
    for batch in (1, 32):
        assert figures[f"batch_{batch}_step"].value == pytest.approx(1e-3, rel=0.5)
    most = 8 * 20 / 20e-3  # a busy machine makes less of it
    assert most / 10 < figures["throughput"].value <= most
    assert 1e-3 <= figures["prompt_5000"].value < 0.1 and 1 < figures["spread_throughput"].value < 2e3
    for part in ("arrivals_100", "prefix"):
        assert 1e-3 <= figures[f"{part}_tpot"].value < 1
    assert figures["prefix_ttft"].value >= 1e-3 and figures["prefix_throughput"].value < 3 / 1e-3
    cold, warm = (figures[f"{start}first_token_load"].value for start in ("cold_", ""))
    assert cold >= 0.4 > warm >= 0.01
    with pytest.raises(SystemExit, match=f"{title} is not in"):
        call(*asked, tmp_path / "nowhere")


def test_a_request_that_sglang_gives_up_is_no_success(benchmarks: None) -> None:
    class Engine:
        def __init__(self) -> None:
            self.loop = asyncio.new_event_loop()

        async def async_generate(self, *, input_ids: list[int], **_: Any) -> Any:
            if input_ids == [1]:
                raise ValueError("too long")
            return {"meta_info": {"completion_tokens": 3, "finish_reason": {"type": "abort"}}}

    driven = importlib.import_module("sglang_child").DrivenSglang(Engine(), by_token=False)
    driven.add(4, BenchRequest((2, 3), 5))
    (progress,) = driven.step()
    assert progress.finished and progress.error == "it ended after 3 of 5 tokens: {'type': 'abort'}"
    assert not driven.has_unfinished()
    driven.add(5, BenchRequest((1,), 5))
    with pytest.raises(ValueError, match="too long"):
        list(driven.step())


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
    answer = {"name": "answer", "revision": "r", "date": "2026-01-01", "machine": machine, "settings": {}}
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
        "batch": "1",
        "options": "-x",
        "peer": "sglang",
        "site": tmp_path,
        "skip": ("serve",),
        "load": "--rate 9",
    }
    commands = dict(gpu.commands(argparse.Namespace(**asked)))
    assert tuple(commands) == gpu.PARTS
    assert commands["serve"][-2:] == ["--rate", "9"] and commands["peer"][-1] == "--no-serve"
    assert dict(gpu.commands(argparse.Namespace(**{**asked, "skip": ()})))["peer"][-2:] == ["--rate", "9"]
    for part, (script, *arguments) in commands.items():
        options = [str(argument).partition("=")[0] for argument in arguments if str(argument).startswith("--")]
        known = script.read_text()
        assert all(f'"{option}"' in known for option in options if option != "--rate")
        assert part == "checkpoint" or "add_json_option(parser)" in known


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
