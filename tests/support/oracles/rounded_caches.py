"""Models over KV caches of eight bits, against transformers with keys and values rounded alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_model import hf_model
from safetensors.torch import load_file
from sm_90 import unplug

from ingot import LLM, SamplingParams
from ingot.cli.views.choices import Choice, choices_of
from ingot.cli.views.filter import Filter
from ingot.compile.driver import compile_model
from ingot.runtime.loading.artifact import open_artifact

LIMITS: dict[str, Any] = {"max_batch": 4, "max_tokens": 16, "max_seq_len": 96}
# Keys or values [batch, heads, tokens, numbers], rounded: of keys in place 0, of values in place 1; and the layer.
Rounding = Callable[[torch.Tensor, int, int], torch.Tensor]
_NEW = 12


def _greedy(folder: Path, prompt: list[int], rounding: Rounding) -> list[int]:
    """Tokens of transformers, all positions from the beginning each time, with rounded keys and values."""
    from transformers import DynamicCache

    class Rounded(DynamicCache):  # type: ignore[misc]  # transformers has no types
        def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any, **more: Any) -> Any:
            return super().update(rounding(key, 0, layer), rounding(value, 1, layer), layer, *rest, **more)

    tensors = {name: one for name, one in load_file(folder / "model.safetensors").items() if "_scale" not in name}
    model = hf_model(json.loads((folder / "config.json").read_text()), tensors, torch.float32, 96)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(_NEW):
            logits = model(torch.tensor([tokens]), past_key_values=Rounded(), use_cache=True).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def check_tokens(folder: Path, artifact: Path, rounding: Rounding) -> None:
    """In pieces of 16 tokens, with a prefix from the cache, and with pages that are too few for all."""
    g = torch.Generator().manual_seed(5)
    beginning = torch.randint(3, 380, (32,), generator=g).tolist()
    prompts = [[*beginning, *torch.randint(3, 380, (n,), generator=g).tolist()] for n in (1, 5, 11)]
    expected = [_greedy(folder, prompt, rounding) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=_NEW, ignore_eos=True)
    for pages in (None, 6):
        llm = LLM(artifact, num_kv_pages=pages)
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected


def check_kernels(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **cache: str) -> list[Choice]:
    """In steps of one token, of few and of prompts; references compute no attention and write no cache. The choices of
    backends for the calls that do."""
    unplug(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # other tests in this process may want the interpreter
    limits: dict[str, Any] = {"max_batch": 2, "max_tokens": 96, "max_seq_len": 96, "jobs": 2, "backend": "triton"}
    path = tmp_path / "a.ingot"
    compile_model(folder, path, dtype="bfloat16", **cache, **limits)
    chosen = [one for one in choices_of(open_artifact(path), Filter()) if "attention" in one.op or "append" in one.op]
    assert {one.backend for one in chosen} == {"triton"}
    assert {one.op.removeprefix("ingot.") for one in chosen} == {
        "append_attention",
        "qk_norm_rope_append",
        "paged_attention",
    }
    return chosen
