"""Deterministic mode on a GPU: a request's tokens and log-probabilities are bitwise those that it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY, Tiny

from ingot import LLM, RequestOutput, SamplingParams, compile_model

pytestmark = pytest.mark.gpu
# Deep enough for products whose columns are split, long enough for contexts that are.
_SHARED = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 320,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS = {
    "qk-norm": Tiny("qwen3-det", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_SHARED}, seed=3),
    "plain": Tiny("llama-det", {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SHARED}, seed=4),
    "experts": replace(
        TINY["qwen3_moe-plain"],
        name="qwen3_moe-det",
        config={"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_SHARED, **_EXPERTS},
        seed=5,
    ),
}
LIMITS: dict[str, Any] = {"max_batch": 96, "max_tokens": 512, "max_seq_len": 1536, "jobs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
# Of tokens and log-probabilities by rank, and of those of the prompt.
Bits = tuple[list[int], list[dict[int, float]]]


@pytest.fixture(scope="module", params=[*MODELS, "plain in int4_g64", "plain in fp8_per_channel_per_token"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deterministic")
    options: dict[str, Any] = {"target": "cuda", "dtype": "bfloat16", "deterministic": True}
    model, _, format = request.param.partition(" in ")
    if format:
        options["quantize"] = format
    compile_model(MODELS[model].write(folder / "checkpoint"), folder / "a.ingot", **options, **LIMITS)
    return folder / "a.ingot"


def prompts() -> list[Any]:
    """Of one token to some splits of a context; eight begin alike."""
    draw = random.Random(7)
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 200, 511, 512, 1300]
    trunk = [draw.randrange(512) for _ in range(530)]
    found = [[draw.randrange(512) for _ in range(length)] for length in lengths]
    return found + [trunk[: draw.choice([48, 100, 530])] + [draw.randrange(512) for _ in range(9)] for _ in range(8)]


def params() -> list[SamplingParams]:
    """Greedy, but for every fifth."""
    drawn = replace(GREEDY, temperature=0.9, top_p=0.9, seed=11)
    return [drawn if place % 5 == 4 else GREEDY for place in range(len(prompts()))]


def bits(output: RequestOutput) -> Bits:
    (sequence,) = output.outputs
    assert sequence.logprobs is not None
    return list(sequence.token_ids), [{i: one.logprob for i, one in place.items()} for place in sequence.logprobs]


def check_same(found: list[Bits], expected: list[Bits]) -> None:
    differ = {
        number: next((place for place, pair in enumerate(zip(*tokens, strict=True)) if pair[0] != pair[1]), None)
        for number, (one, other) in enumerate(zip(found, expected, strict=True))
        for tokens in [(one[0], other[0])]
        if one != other
    }
    assert not differ, f"of {len(expected)} requests, by the first token that differs, if one does: {differ}"


@pytest.fixture(scope="module")
def alone(made: Path) -> list[Bits]:
    llm = LLM(made, num_kv_pages=1200, enable_prefix_caching=False)
    return [bits(llm.generate([one], [how])[0]) for one, how in zip(prompts(), params(), strict=True)]


def test_together(made: Path, alone: list[Bits]) -> None:
    llm = LLM(made, num_kv_pages=1200, enable_prefix_caching=False)
    check_same([bits(one) for one in llm.generate(prompts(), params())], alone)
    crowd = llm.generate([*prompts() * 4, [5, 6, 7]], [*params() * 4, GREEDY])
    for first in range(0, 80, 20):
        check_same([bits(one) for one in crowd[first : first + 20]], alone)


@pytest.mark.parametrize("cut", [97, 131, 333])
def test_prompts_cut_at_odd_places(made: Path, alone: list[Bits], cut: int) -> None:
    llm = LLM(made, num_kv_pages=1200, enable_prefix_caching=False, max_num_seqs=32, max_num_batched_tokens=cut)
    check_same([bits(one) for one in llm.generate(prompts(), params())], alone)


def test_shared_pages(made: Path, alone: list[Bits]) -> None:
    llm = LLM(made, num_kv_pages=1200)
    for _ in range(2):
        found = llm.generate(prompts(), params())
        check_same([bits(one) for one in found], alone)
    assert sum(one.num_cached_tokens for one in found) > 2000


def test_steps_by_instructions(made: Path, alone: list[Bits]) -> None:
    llm = LLM(made, num_kv_pages=400, enable_prefix_caching=False, cuda_graphs="none", max_num_seqs=7)
    check_same([bits(one) for one in llm.generate(prompts(), params())], alone)
