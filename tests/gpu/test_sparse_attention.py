"""Sparse attention on a GPU: an indexer's choice and attention over it by kernels, in graphs, and in served models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from call_oracle import difference, same_bits
from one_call import TARGET, OneCall, moved
from paged_steps import Heads, PagedStep, paged_step
from serve_artifact import teacher_forced_artifact
from tiny import TINY

from ingot import LLM, SamplingParams, compile_model
from ingot.backends.triton import load as triton
from ingot.backends.triton.emit import Triton
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.runtime.cuda.graphs.sizes import is_capturable
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.loader import load_artifact

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


def replayed(call: OneCall, folder: Path, others: list[OneCall]) -> list[list[torch.Tensor]]:
    """Results of `call` and of `others`, which have its sizes, by one graph; three replays of each."""
    folder.mkdir()
    executable = Triton().emit(call.body(), call.op, TARGET, folder)
    execute = triton.load(executable, folder, on_one_device("cuda"))
    on_device = [moved(tensor, "cuda") for tensor in call.tensors]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            execute(*on_device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (result,) = execute(*on_device)
    found: list[list[torch.Tensor]] = []
    for one in (call, *others):
        for held, given in zip(on_device, one.tensors, strict=True):
            held.copy_(given)
        found.append([])
        for _ in range(3):
            result.fill_(float("nan") if result.is_floating_point() else 113)
            graph.replay()
            found[-1].append(result.cpu())
    return found


@pytest.mark.parametrize("mix", MIXES)
def test_one_graph_serves_all_choices_to_the_bit(mix: str, tmp_path: Path) -> None:
    """Without a look from the host. Of equal scores the earlier positions count, in every replay."""
    calls = [choice_of(mix, seed, whole=True) for seed in (1, 2)]
    for call, results in zip(calls, replayed(calls[0], tmp_path / "choose", calls[1:]), strict=True):
        (expected,) = call.reference()
        assert all(torch.equal(one, expected) for one in results)
    attentions = [attention_of(mix, seed, call.reference()[0]) for seed, call in enumerate(calls)]
    for call, results in zip(attentions, replayed(attentions[0], tmp_path / "attend", attentions[1:]), strict=True):
        assert all(same_bits(one, results[0]) for one in results)
        problem = difference(call, results[:1])
        assert problem is None, problem


@pytest.mark.parametrize("mix", ["decode", "prompt"])
def test_scores_of_random_numbers_decide_within_their_rounding(mix: str, tmp_path: Path) -> None:
    """No position that is left out has a score above that of a chosen one, but by a rounding."""
    call = choice_of(mix, 3, whole=False)
    (found, *_), (q, keys, weights, table, starts, lens, totals) = replayed(call, tmp_path / "m", [])[0], call.args
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
    plain, compiled = tmp_path / "plain.ingot", tmp_path / "compiled.ingot"
    compile_model(checkpoint, plain, target="cpu", backend="reference", dtype="float32", **LIMITS)
    options: dict[str, Any] = {"deterministic": deterministic, "dtype": "float32"}
    compile_model(checkpoint, compiled, target="cuda", **options, **LIMITS)
    buckets = load_artifact(compiled, num_pages=64).plan.buckets
    for op in ("ingot.paged_choose_positions", "ingot.sparse_attention"):
        calls = [one for bucket in buckets for one in bucket.instructions if one.target == op]
        assert calls and all(one.backend == "triton" for one in calls)
    assert all(map(is_capturable, buckets))
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
