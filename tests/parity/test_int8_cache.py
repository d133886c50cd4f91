"""A model served over a KV cache in int8 with scales per token gives the tokens of transformers with keys and values
rounded alike: prompts in pieces, prefixes from the cache, and sequences that lose their pages keep the scales."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_model import hf_model
from safetensors.torch import load_file
from sm_90 import unplug
from tiny import TINY

from ingot import LLM, SamplingParams
from ingot.cli.views.choices import choices_of
from ingot.cli.views.filter import Filter
from ingot.compile.driver import compile_model
from ingot.compile.recorded_request import recorded_request
from ingot.ir.cache.summary import CacheSummary
from ingot.runtime.loading.artifact import open_artifact

NEW = 12
LIMITS: dict[str, Any] = {"max_batch": 4, "max_tokens": 16, "max_seq_len": 96}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["llama-plain"].write(tmp_path_factory.mktemp("int8") / "plain")


@pytest.fixture(scope="module")
def artifact_in_int8(checkpoint: Path, ingot_cache: Path) -> Path:
    path = checkpoint.parent / "int8.ingot"
    compile_model(checkpoint, path, target="cpu", kv_cache_dtype="int8", jobs=1, **LIMITS)
    return path


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Keys or values [batch, heads, tokens, numbers]: the largest number of a row becomes 127 or -127."""
    scale = (x.abs().max(-1, keepdim=True).values / 127).clamp(min=1e-38)
    return (x / scale).round() * scale


def _oracle(folder: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers, all positions from the beginning each time, with rounded keys and values."""
    from transformers import DynamicCache

    class Rounded(DynamicCache):  # type: ignore[misc]  # transformers has no types
        def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any, **more: Any) -> Any:
            return super().update(rounded(key), rounded(value), layer, *rest, **more)

    tensors = load_file(folder / "model.safetensors")
    model = hf_model(json.loads((folder / "config.json").read_text()), tensors, torch.float32, 96)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([tokens]), past_key_values=Rounded(), use_cache=True).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_tokens_are_those_of_transformers_with_rounded_rows(checkpoint: Path, artifact_in_int8: Path) -> None:
    """In pieces of 16 tokens, with a prefix from the cache, and with pages that are too few for all."""
    g = torch.Generator().manual_seed(5)
    beginning = torch.randint(3, 380, (32,), generator=g).tolist()
    prompts = [[*beginning, *torch.randint(3, 380, (n,), generator=g).tolist()] for n in (1, 5, 11)]
    expected = [_oracle(checkpoint, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for pages in (None, 6):
        llm = LLM(artifact_in_int8, num_kv_pages=pages)
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected


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
    """In steps of one token, of few and of prompts; references compute no attention and write no cache."""
    unplug(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # other tests in this process may want the interpreter
    limits: dict[str, Any] = {"max_batch": 2, "max_tokens": 96, "max_seq_len": 96, "jobs": 2, "backend": "triton"}
    path, dtype = tmp_path / "a.ingot", {"dtype": "bfloat16", "kv_cache_dtype": name, "kv_cache_scales": "token"}
    compile_model(checkpoint, path, target=target, **dtype, **limits)
    chosen = [one for one in choices_of(open_artifact(path), Filter()) if "attention" in one.op or "append" in one.op]
    assert {one.backend for one in chosen} == {"triton"}
    assert {one.op.removeprefix("ingot.") for one in chosen} == {
        "append_attention",
        "qk_norm_rope_append",
        "paged_attention",
    }
