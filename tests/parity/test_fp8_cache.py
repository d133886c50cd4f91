"""A model served over a KV cache of eight bits gives the tokens of transformers with keys and values rounded alike."""

import json
from pathlib import Path

import pytest
import torch
from rounded_caches import LIMITS, check_kernels, check_tokens
from safetensors.torch import load_file, save_file
from scaled_checkpoint import SCALES, write_scaled
from tiny import TINY

from ingot.compile.driver import compile_model
from ingot.ir.errors import CheckpointError, OptionError, TargetError


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the scales of its caches."""
    return write_scaled(TINY["llama-plain"], tmp_path_factory.mktemp("fp8") / "scaled")


@pytest.fixture(scope="module")
def artifact_of_eight_bits(scaled: Path, ingot_cache: Path) -> Path:
    path = scaled.parent / "fp8.ingot"
    compile_model(scaled, path, target="cpu", deterministic=True, kv_cache_dtype="fp8", jobs=1, **LIMITS)
    return path


def rounded(x: torch.Tensor, of_values: int, layer: int) -> torch.Tensor:
    scale = torch.tensor(SCALES[layer][of_values])
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_tokens_are_those_of_transformers_with_rounded_keys_and_values(
    scaled: Path, artifact_of_eight_bits: Path
) -> None:
    check_tokens(scaled, artifact_of_eight_bits, rounded)


def test_the_artifact_says_its_caches_and_they_take_a_quarter_of_float32(artifact_of_eight_bits: Path) -> None:
    plans = json.loads((artifact_of_eight_bits / "plan.json").read_text())["positions"]["all"]["plans"]["main"]
    # Keys and values of 5 heads of 14 numbers in 3 layers, pages of 16 positions.
    assert plans["memory"]["groups"]["full"]["page"] == 3 * 2 * 16 * 5 * 14
    program = (artifact_of_eight_bits / "program.ir").read_text()
    assert "state kv.1: paged_kv f8e4m3[pages, 2, 16, 5, 14]" in program
    assert "k_scale=1.5" in program


@pytest.mark.slow
@pytest.mark.xdist_group("sm-90-kernels")
def test_a_gpu_gets_kernels_for_such_caches(scaled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = check_kernels(scaled, tmp_path, monkeypatch, target="sm_90", kv_cache_dtype="fp8")
    assert len({one.program for one in chosen}) > 3


def test_odd_scales_and_targets_are_refused(scaled: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown kv_cache_dtype 'fp4'"):
        compile_model(scaled, tmp_path / "a.ingot", target="cpu", kv_cache_dtype="fp4")
    with pytest.raises(TargetError, match="fp8, which sm_80 does not convert"):
        compile_model(scaled, tmp_path / "a.ingot", target="sm_80", kv_cache_dtype="fp8")
    folder = TINY["llama-plain"].write(tmp_path / "odd")
    tensors = load_file(folder / "model.safetensors")
    for value, match in ((-1.0, "is -1.0"), (0.5, "for k alone")):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(value)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=match):
            compile_model(folder, tmp_path / "a.ingot", target="cpu", kv_cache_dtype="fp8", backend="reference")
