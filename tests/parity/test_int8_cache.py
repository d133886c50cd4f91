"""A model served over a KV cache in int8 with scales per token gives the tokens of transformers with keys and values
rounded alike: prompts in pieces, prefixes from the cache, and sequences that lose their pages keep the scales."""

import json
from pathlib import Path

import pytest
import torch
from rounded_caches import LIMITS, check_kernels, check_tokens
from tiny import TINY

from ingot import LLM
from ingot.compile.driver import compile_model
from ingot.compile.recorded_request import recorded_request
from ingot.ir.cache.summary import CacheSummary
from ingot.runtime.loading.artifact import open_artifact


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["llama-plain"].write(tmp_path_factory.mktemp("int8") / "plain")


@pytest.fixture(scope="module")
def artifact_in_int8(checkpoint: Path, ingot_cache: Path) -> Path:
    path = checkpoint.parent / "int8.ingot"
    compile_model(checkpoint, path, target="cpu", kv_cache_dtype="int8", jobs=1, **LIMITS)
    return path


def rounded(x: torch.Tensor, of_values: int, layer: int) -> torch.Tensor:
    """Keys or values [batch, heads, tokens, numbers]: the largest number of a row becomes 127 or -127."""
    scale = (x.abs().max(-1, keepdim=True).values / 127).clamp(min=1e-38)
    return (x / scale).round() * scale


def test_tokens_are_those_of_transformers_with_rounded_rows(checkpoint: Path, artifact_in_int8: Path) -> None:
    check_tokens(checkpoint, artifact_in_int8, rounded)


def test_the_artifact_says_its_caches(artifact_in_int8: Path) -> None:
    """Rows of 14 numbers, 2 unused bytes and a scale: 20 bytes."""
    plans = json.loads((artifact_in_int8 / "plan.json").read_text())["positions"]["all"]["plans"]["main"]
    assert plans["memory"]["groups"]["full"]["page"] == 3 * 2 * 16 * 5 * 20
    program = (artifact_in_int8 / "program.ir").read_text()
    assert "state kv.1: paged_kv i8[pages, 2, 16, 5, 20]" in program and "per_token=True" in program
    (group,) = CacheSummary.of(LLM(artifact_in_int8).loaded.plans).groups
    assert group.forms == ("5 heads, keys of 14 numbers and values of 14, with scales per token, i8",)
    request = recorded_request(open_artifact(artifact_in_int8))
    assert request.scales_per_token and request.options["kv_cache_scales"] == "auto"


@pytest.mark.slow
@pytest.mark.xdist_group("sm-90-kernels")
@pytest.mark.parametrize(("target", "name"), [("sm_80", "int8"), ("sm_90", "int8"), ("sm_90", "fp8")])
def test_a_gpu_gets_kernels_for_such_caches(
    checkpoint: Path, target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kernels(checkpoint, tmp_path, monkeypatch, target=target, kv_cache_dtype=name, kv_cache_scales="token")
