"""Models with latent attention on a GPU by its kernels: without experts, in steps of all sizes, with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import disagreement
from serve_artifact import teacher_forced_artifact
from tiny import TINY

from ingot import LLM, SamplingParams, compile_model
from ingot.ir.numerics.tolerances import compare

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu_latents")]
LIMITS: dict[str, Any] = {"max_batch": 8, "max_tokens": 512, "max_seq_len": 160, "jobs": 4}
CHUNKS = (None, 15, 5, 1)  # tokens of a sequence in a step
# Sums of another order in float32 through a few layers, in units of what one op may differ by (test_families.py).
FACTOR = 32.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# What a row of DeepSeek's caches holds, in a model that is small elsewhere.
PUBLISHED = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def dense(name: str, folder: Path, **fields: Any) -> Path:
    """A tiny checkpoint whose layers have no experts."""
    return TINY[name].write(folder, first_k_dense_replace=TINY[name].config["num_hidden_layers"], **fields)


def sequences(name: str) -> list[list[int]]:
    prompts = TINY[name].prompts()
    return [prompts[-1], prompts[3], prompts[4]]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v2-lite", "deepseek_v3-groups", "deepseek_v3-halves"])
def test_logits_and_tokens_in_float32(name: str, deterministic: bool, tmp_path: Path) -> None:
    """Odd sizes. Tokens are those of the references, also of prompts whose first pages are cached, and again in steps
    of a graph."""
    checkpoint = dense(name, tmp_path / "m")
    plain, compiled = tmp_path / "plain.ingot", tmp_path / "compiled.ingot"
    compile_model(checkpoint, plain, target="cpu", backend="reference", dtype="float32", **LIMITS)
    options = {"deterministic": deterministic, "dtype": "float32"}
    report = compile_model(checkpoint, compiled, target="cuda", **options, **LIMITS)
    assert report.nodes_per_backend["triton"] > 0
    for chunk in CHUNKS:
        logits = [teacher_forced_artifact(str(path), sequences(name), chunk) for path in (compiled, plain)]
        for found, expected in zip(*logits, strict=True):
            problem = compare(found, expected, expected.dtype, factor=FACTOR)
            assert problem is None, problem
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in TINY[name].prompts()]
    wanted = [list(one.outputs[0].token_ids) for one in LLM(plain).generate(prompts, GREEDY)]
    llm = LLM(compiled, enable_prefix_caching=True)
    first, again = llm.generate(prompts, GREEDY), llm.generate(prompts, GREEDY)
    for found in (first, again):
        assert [list(one.outputs[0].token_ids) for one in found] == wanted
    assert sum(one.num_cached_tokens or 0 for one in again) > 0


@pytest.mark.parametrize("heads", [16, 128])
def test_logits_of_published_heads_in_bfloat16(heads: int, tmp_path: Path) -> None:
    """As near to float32 as the references in bfloat16."""
    name = "deepseek_v3-groups"
    sizes = {**PUBLISHED, "num_attention_heads": heads, "num_key_value_heads": heads}
    checkpoint = dense(name, tmp_path / "m", **sizes)
    logits = []
    for dtype in ("float32", "bfloat16"):
        path = tmp_path / f"{dtype}.ingot"
        compile_model(checkpoint, path, target="cpu", backend="reference", dtype=dtype, **LIMITS)
        logits.append(torch.cat(teacher_forced_artifact(str(path), sequences(name), None)))
    compiled = tmp_path / "compiled.ingot"
    compile_model(checkpoint, compiled, target="cuda", dtype="bfloat16", **LIMITS)
    for chunk in CHUNKS:
        found = torch.cat(teacher_forced_artifact(str(compiled), sequences(name), chunk))
        problem = disagreement(found, *logits, torch.bfloat16)
        assert problem is None, f"{chunk or 'all'} tokens a step: {problem}"
