"""A model served over a KV cache of eight bits gives the tokens of transformers with keys and values rounded alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_model import hf_model
from safetensors.torch import load_file, save_file
from scaled_checkpoint import SCALES, write_scaled
from sm_90 import unplug
from tiny import TINY

from ingot import LLM, SamplingParams
from ingot.cli.views.choices import choices_of
from ingot.cli.views.filter import Filter
from ingot.compile.driver import compile_model
from ingot.ir.errors import CheckpointError, OptionError, TargetError
from ingot.runtime.loading.artifact import open_artifact

NEW = 12


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the scales of its caches."""
    return write_scaled(TINY["llama-plain"], tmp_path_factory.mktemp("fp8") / "scaled")


@pytest.fixture(scope="module")
def artifact_of_eight_bits(scaled: Path, ingot_cache: Path) -> Path:
    path = scaled.parent / "fp8.ingot"
    limits = {"max_batch": 4, "max_tokens": 16, "max_seq_len": 96}
    compile_model(scaled, path, target="cpu", deterministic=True, kv_cache_dtype="fp8", jobs=1, **limits)
    return path


def _oracle(folder: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers, all positions from the beginning each time, with rounded keys and values."""
    from transformers import DynamicCache

    class Rounded(DynamicCache):  # type: ignore[misc]  # transformers has no types
        def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any, **more: Any) -> Any:
            rounded = []
            for x, scale in zip((key, value), SCALES[layer], strict=True):
                scale = torch.tensor(scale)
                rounded.append((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
            return super().update(*rounded, layer, *rest, **more)

    tensors = {name: one for name, one in load_file(folder / "model.safetensors").items() if "_scale" not in name}
    model = hf_model(json.loads((folder / "config.json").read_text()), tensors, torch.float32, 96)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([tokens]), past_key_values=Rounded(), use_cache=True).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_tokens_are_those_of_transformers_with_rounded_keys_and_values(
    scaled: Path, artifact_of_eight_bits: Path
) -> None:
    """In pieces of 16 tokens, with a prefix from the cache, and with pages that are too few for all."""
    g = torch.Generator().manual_seed(5)
    beginning = torch.randint(3, 380, (32,), generator=g).tolist()
    prompts = [[*beginning, *torch.randint(3, 380, (n,), generator=g).tolist()] for n in (1, 5, 11)]
    expected = [_oracle(scaled, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for pages in (None, 6):
        llm = LLM(artifact_of_eight_bits, num_kv_pages=pages)
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected


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
    """In steps of one token, of few and of prompts; references compute no attention and write no cache."""
    unplug(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # other tests in this process may want the interpreter
    limits: dict[str, Any] = {"max_batch": 2, "max_tokens": 96, "max_seq_len": 96, "jobs": 2, "backend": "triton"}
    path = tmp_path / "a.ingot"
    compile_model(scaled, path, target="sm_90", dtype="bfloat16", kv_cache_dtype="fp8", **limits)
    chosen = [one for one in choices_of(open_artifact(path), Filter()) if "attention" in one.op or "append" in one.op]
    assert {one.backend for one in chosen} == {"triton"} and len({one.program for one in chosen}) > 3
    assert {one.op.removeprefix("ingot.") for one in chosen} == {
        "append_attention",
        "qk_norm_rope_append",
        "paged_attention",
    }


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
