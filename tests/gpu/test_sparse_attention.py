"""Sparse attention on a GPU: an indexer's choice and attention over it by kernels, in graphs, and in served models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from call_oracle import difference, same_bits
from kernels_and_references import compiled_twice
from one_call import OneCall
from paged_steps import Heads, PagedStep, paged_step
from replayed_graph import replays
from serve_artifact import teacher_forced_artifact
from tiny import TINY

from ingot import LLM, SamplingParams
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu_sparse")]
# DeepSeek-V3.2's indexer, and its cache of latents with the q heads of one device of eight.
INDEXER, LATENTS, TOP_K = Heads(64, 1, 128, shared=True), Heads(16, 1, 576, 512, shared=True), 2048
# Decoding with contexts above and below what is chosen, and one that feeds nothing; a prompt beside decoding.
MIXES = {
    "decode": [(1, 16000), (1, 100), (0, 9), *((1, 1500 + 97 * place) for place in range(20)), (1, 2047), (1, 2048)],
    "one": [(1, 9000)],
    "prompt": [(70, 4000), (1, 3000), (33, 2030), (1, 0)],
}
LIMITS: dict[str, Any] = {"max_batch": 8, "max_tokens": 512, "max_seq_len": 160, "jobs": 4}
CHUNKS = (None, 15, 1)  # tokens of a sequence in a step
# Sums of another order in float32 through a few layers, in units of what one op may differ by (test_families.py).
FACTOR = 32.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def filled(step: PagedStep) -> torch.Tensor:
    cache: torch.Tensor = OPS["kv_append"].reference(step.kv, step.k, None, step.slots)
    return cache


def choice_of(mix: str, seed: int, *, whole: bool) -> OneCall:
    """A call of the indexer. With `whole`, scores are whole numbers, exact in any order, and many are equal."""
    g = torch.Generator().manual_seed(seed)
    step = paged_step(g, torch.bfloat16, INDEXER, MIXES[mix], gap=1, behind=2)
    q, keys, weights = step.q, filled(step), torch.randn(step.q.shape[:2], generator=g)
    if whole:
        q, drawn = (torch.randint(-2, 3, one.shape, generator=g).to(one.dtype) for one in (q, keys))
        keys = torch.where(keys.isnan(), keys, drawn)
        weights = torch.randint(-2, 3, weights.shape, generator=g).float()
    return OneCall("paged_choose_positions", (q, keys, weights, *step.lens), {"top_k": TOP_K})


def attention_of(mix: str, seed: int, chosen: torch.Tensor) -> OneCall:
    step = paged_step(torch.Generator().manual_seed(seed), torch.bfloat16, LATENTS, MIXES[mix], gap=1, behind=2)
    return OneCall("sparse_attention", (step.q, filled(step), chosen, *step.lens[:3]), LATENTS.options)


@pytest.mark.parametrize("mix", MIXES)
def test_one_graph_serves_all_choices_to_the_bit(mix: str, tmp_path: Path) -> None:
    """Without a look from the host. Of equal scores the earlier positions count, in every replay."""
    calls = [choice_of(mix, seed, whole=True) for seed in (1, 2)]
    for call, results in zip(calls, replays(calls, tmp_path / "choose", times=3), strict=True):
        (expected,) = call.reference()
        assert all(torch.equal(one, expected) for one in results)
    attentions = [attention_of(mix, seed, call.reference()[0]) for seed, call in enumerate(calls)]
    for call, results in zip(attentions, replays(attentions, tmp_path / "attend", times=3), strict=True):
        assert all(same_bits(one, results[0]) for one in results)
        problem = difference(call, results[:1])
        assert problem is None, problem


@pytest.mark.parametrize("mix", ["decode", "prompt"])
def test_scores_of_random_numbers_decide_within_their_rounding(mix: str, tmp_path: Path) -> None:
    """No position that is left out has a score above that of a chosen one, but by a rounding."""
    call = choice_of(mix, 3, whole=False)
    ((found,),), (q, keys, weights, table, starts, lens, totals) = replays([call], tmp_path), call.args
    page = keys.shape[2]
    for sequence, (start, count, total) in enumerate(zip(starts.tolist(), lens.tolist(), totals.tolist(), strict=True)):
        places = torch.arange(total)
        held = keys[table[sequence][places // page].long(), 0, places % page, 0].double()
        for nth in {0, count - 1} if count else ():
            seen = total - count + nth + 1
            row = found[start + nth].long()
            kept = row[row >= 0]
            assert len(kept) == min(seen, TOP_K) and bool((kept.diff() > 0).all()) and int(kept[-1]) < seen
            scores = (held[:seen] @ q[start + nth].double().T).relu() @ weights[start + nth].double()
            left = torch.ones(seen, dtype=torch.bool).index_fill(0, kept, False)
            if bool(left.any()):
                assert float(scores[left].max()) <= float(scores[kept].min()) + 1e-5 * float(scores.abs().max())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v32-few", "deepseek_v32-listed"])
def test_logits_and_tokens_in_float32(name: str, deterministic: bool, tmp_path: Path) -> None:
    """A tiny model without experts: contexts above and below what it chooses, chunks, prefixes, and graphs."""
    layers = TINY[name].config["num_hidden_layers"]
    fields = {"mlp_layer_types": ["dense"] * layers} if "mlp_layer_types" in TINY[name].config else {}
    checkpoint = TINY[name].write(tmp_path / "m", **fields or {"first_k_dense_replace": layers})
    kernels = ("paged_choose_positions", "sparse_attention")
    plain, compiled = compiled_twice(checkpoint, tmp_path, kernels, deterministic=deterministic, **LIMITS)
    prompts = TINY[name].prompts()
    for chunk in CHUNKS:
        sequences = [prompts[-1], prompts[3], prompts[4]]
        logits = [teacher_forced_artifact(str(path), sequences, chunk) for path in (compiled, plain)]
        for found, expected in zip(*logits, strict=True):
            problem = compare(found, expected, expected.dtype, factor=FACTOR)
            assert problem is None, problem
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    wanted = [list(one.outputs[0].token_ids) for one in LLM(plain).generate(given, GREEDY)]
    llm = LLM(compiled, enable_prefix_caching=True)
    for _ in range(2):
        assert [list(one.outputs[0].token_ids) for one in llm.generate(given, GREEDY)] == wanted
