"""Mixtures of experts on a GPU: one graph serves every routing, without a look from the host, and models with experts
have the tokens and logits of the references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from call_oracle import difference, same_bits
from experts_oracle import experts_difference
from kernels_and_references import compiled_twice
from never_waiting import NeverWaiting
from one_call import OneCall
from replayed_graph import replays
from serve_artifact import Job, serve
from tiny import CHECKPOINTS

from ingot import LLM, SamplingParams, compile_model
from ingot.ir.formats import PARTS, find_format
from ingot.ir.formats.stacked import quantize_stack
from ingot.ir.numerics.tolerances import compare

pytestmark = pytest.mark.gpu
EXPERTS, TOP_K, HIDDEN, FFN = 16, 4, 320, 200
# Steps whose choices are computed one by one, and in blocks of 16, 32, 64 and 128.
TOKENS = (1, 2, 16, 33, 100, 300, 1000)
# Steps of all bucket classes: prompts reach 97 tokens, and are served together.
LIMITS: dict[str, Any] = {"max_batch": 8, "max_tokens": 512, "max_seq_len": 160}
NEW_TOKENS = 24
# Sums of another order in float32 through a handful of layers, in units of what one op may differ by.
FACTOR = 32.0


def routings(tokens: int, g: torch.Generator) -> dict[str, torch.Tensor]:
    """All tokens choose the first experts, or the last; evenly many choose each; and at random."""
    first = torch.arange(TOP_K).expand(tokens, TOP_K)
    drawn = torch.rand(tokens, EXPERTS, generator=g).argsort(-1)[:, :TOP_K]
    even = torch.arange(tokens * TOP_K).view(tokens, TOP_K) % EXPERTS
    found = {"first": first, "last": EXPERTS - 1 - first, "even": even, "random": drawn}
    return {name: one.int().clone(memory_format=torch.contiguous_format) for name, one in found.items()}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_graph_serves_all_routings(tokens: int, dtype: torch.dtype, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * shape[-1] ** -0.5).to(dtype)

    x, weights = torch.randn(tokens, HIDDEN, generator=g).to(dtype), torch.rand(tokens, TOP_K, generator=g)
    matrices = (
        draw(EXPERTS, 2 * FFN, HIDDEN),
        draw(EXPERTS, HIDDEN, FFN),
        draw(EXPERTS, 2 * FFN),
        draw(EXPERTS, HIDDEN),
    )
    given = routings(tokens, g)
    calls = [OneCall("experts", (x, weights, one, *matrices), {"activation": "clamped"}) for one in given.values()]
    for name, call, results in zip(given, calls, replays(calls, tmp_path, times=3), strict=True):
        assert all(same_bits(one, results[0]) for one in results), f"{name}: two replays give different bits"
        problem = difference(call, results[:1])
        assert problem is None, f"{name}: {problem}"


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "fp8_block128", "int4_g128", "int8", "nvfp4"])
@pytest.mark.parametrize("tokens", (1, 3, 16, 100, 1000))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_quantized_weights_in_a_graph(tokens: int, format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """One graph serves all routings."""
    g, hidden, ffn = torch.Generator().manual_seed(tokens), 384, 256
    made = [
        quantize_stack(torch.randn(EXPERTS, *shape, generator=g) * shape[1] ** -0.5, find_format(format))
        for shape in ((2 * ffn, hidden), (hidden, ffn))
    ]
    biases = [(torch.randn(EXPERTS, size, generator=g)).to(dtype) for size in (2 * ffn, hidden)]
    parts = [one.get(part) for one in made for part in PARTS[1:]]
    x, weights = torch.randn(tokens, hidden, generator=g).to(dtype), torch.rand(tokens, TOP_K, generator=g)
    given = routings(tokens, g)
    options = {"activation": "clamped", "gate_up_format": format, "down_format": format}
    stored = [one["weight"] for one in made]
    calls = [OneCall("experts", (x, weights, one, *stored, *biases, *parts), options) for one in given.values()]
    for name, call, (result,) in zip(given, calls, replays(calls, tmp_path), strict=True):
        problem = experts_difference(call.args, options, result)
        assert problem is None, f"{name}: {problem}"


@pytest.mark.parametrize("format", ["mxfp4", "int8", "fp8"])
def test_a_model_with_quantized_experts_has_the_tokens_of_the_references(
    format: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    tiny = replace(CHECKPOINTS["qwen3_moe-plain"], config={**CHECKPOINTS["qwen3_moe-plain"].config, **sizes})
    stored = tiny.write(tmp_path / "m")
    options: dict[str, Any] = {"quantize": format, "quantize_ignore": ["*.self_attn.*"], **LIMITS}
    plain, compiled = compiled_twice(stored, tmp_path, ["experts"], **options)
    prompts = tiny.prompts()
    jobs = [Job(str(path), prompts, [prompts[-1]], NEW_TOKENS, chunked=False) for path in (plain, compiled)]
    expected, found = (serve(job) for job in jobs)
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("name", ["qwen3_moe-plain", "gpt_oss-yarn", "phimoe-biased", "qwen2_moe-shared"])
def test_a_model_has_the_tokens_and_logits_of_the_references(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    plain, compiled = compiled_twice(checkpoint(name), tmp_path, ["experts"], **LIMITS)
    prompts = CHECKPOINTS[name].prompts()
    jobs = [Job(str(path), prompts, [prompts[-1], prompts[3]], NEW_TOKENS, chunked=False) for path in (plain, compiled)]
    expected, found = (serve(job) for job in jobs)
    assert found.tokens == expected.tokens
    for one, other in zip(found.logits, expected.logits, strict=True):
        problem = compare(one, other, other.dtype, factor=FACTOR)
        assert problem is None, problem


def test_no_step_waits_for_a_routing(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where nothing is captured."""
    name, params = "qwen3_moe-plain", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
    compile_model(checkpoint(name), tmp_path / "a.ingot", target="cuda", dtype="bfloat16", **LIMITS)
    llm = LLM(tmp_path / "a.ingot", cuda_graphs="none", enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in CHECKPOINTS[name].prompts()]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    executor = NeverWaiting(llm.loaded.executor)
    llm.llm_engine.launch_through(executor)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert max(executor.tokens) > 64 and min(executor.tokens) <= 8
