"""Benchmarks measure what they say, and leave it in one form; results that are committed keep to it."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError
from safetensors import safe_open
from staged import BACKENDS, staged, traced

from ingot import compile_model
from ingot.ir.plan import Plans

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


@pytest.mark.parametrize("backends", [BACKENDS, BACKENDS[1:]], ids=["regions", "calls"])
@pytest.mark.parametrize("shape", ["1b", "8b", "qwen3-0.6b"])
def test_the_bytes_of_a_step(benchmarks: None, shape: str, backends: Any) -> None:
    """Against the sizes of the checkpoint's tensors, and the cache's size by hand; a layer of Qwen 3 has a window."""
    checkpoints = importlib.import_module("random_checkpoint")
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    config = config_of(shape, **(window if shape == "qwen3-0.6b" else {}))
    program = staged(traced(config), backends=backends)[0][-1].program
    assert bool(program.regions) == (backends is BACKENDS)
    found = importlib.import_module("traffic").program_traffic(program, 3, 40.5)
    read = dict(checkpoints.tensor_shapes(config))
    if "lm_head.weight" in read:
        del read["model.embed_tokens.weight"]  # of which a step reads three rows
    assert found.weights == 2 * sum(map(math.prod, read.values()))
    position = 2 * 2 * 16 * 2  # keys and values of two heads of 16, in bfloat16
    seen = 40.5 + (24 if shape == "qwen3-0.6b" else 40.5)
    assert found.cache == 3 * (seen + 2) * position
    assert found.bytes == found.weights + found.cache


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


def test_decode(artifact: Path, results: ModuleType, committed: None, tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "decode.py"), str(artifact)]
    options = ["--batch", "1,3", "--long", "12", "--short", "4", "--tries", "1", "--json", str(tmp_path / "found.json")]
    done = subprocess.run([*script, *options], check=True, capture_output=True, text=True)
    figures = results.read_result(tmp_path / "found.json").figures
    assert "batch 1: " in done.stdout and "of a copy's" in done.stdout
    for batch in (1, 3):
        step, share = figures[f"batch_{batch}_step"].value, figures[f"batch_{batch}_of_copy"].value
        moved = figures[f"batch_{batch}_weights"].value + figures[f"batch_{batch}_cache"].value
        assert 0 < step < 1 and share == pytest.approx(moved / step / figures["copy"].value)
        assert len(figures[f"batch_{batch}_long"].values) == 1
    refused = subprocess.run([*script, "--batch", "64"], capture_output=True, text=True)
    assert refused.returncode and "too many" in refused.stderr and "Traceback" not in refused.stderr


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
