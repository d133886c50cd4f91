"""Benchmarks of attention kernels: what they count, what they time, and that wrong results become no figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peer_flashinfer
import pytest
import torch
from drawn import drawn
from kernel_benchmarks import MACHINE, Script, interpreted
from triton_interpreter import eight_bits_converted

from ingot.backends.flashinfer.packages import Missing
from ingot.backends.triton.tune.device import Pool
from ingot.ir.machine.target import Target
from ingot.ir.ops import paged_attention

pytestmark = pytest.mark.one_in_file(3)

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@interpreted
def test_decode_attention(on_cpu: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and FlashInfer's compute the attention of the steps."""
    attention, contexts = on_cpu("attention"), (20, 1)
    problem = attention.problem_of(SMALL, len(contexts))
    assert (problem.kv_heads, problem.group, problem.dim, problem.tokens, problem.append) == (2, 2, 16, 16, True)
    assert attention.cached_bytes(problem, contexts) == (20 + 1) * 2 * 2 * 16 * 2  # keys and values in bfloat16
    problem = replace(problem, dtype="f32")  # the interpreter's products of bfloat16 are wrong
    peer_flashinfer.install(monkeypatch)
    times = attention.measure(MACHINE, problem, contexts, Pool(), peer=True)
    assert times == {"triton": [1e-3 / 2] * 11, "flashinfer": [1e-3 / 2] * 11}
    narrow = replace(problem, cache_dtype="f8e4m3")
    assert attention.cached_bytes(narrow, contexts) == (20 + 1) * 2 * 2 * 16
    with eight_bits_converted():
        assert attention.measure(MACHINE, narrow, contexts, Pool(), peer=False) == {"triton": [1e-3 / 2] * 11}


@interpreted
def test_wrong_attention_is_no_figure(on_cpu: Script, wrong: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ours nor FlashInfer's, which computes nothing here."""
    attention, pool = on_cpu("attention"), Pool()
    problem = replace(attention.problem_of(SMALL, 1), dtype="f32")
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        attention.measure(MACHINE, problem, (40,), pool, peer=False)
    peer_flashinfer.install(monkeypatch)
    monkeypatch.setattr(peer_flashinfer.Wrapper, "run", lambda self, q, kv, out: out)
    with pytest.raises(RuntimeError, match="wrong by nan"):
        attention.flashinfers(attention.Steps(replace(problem, append=False), attention.Mix((40,)), pool))


def test_what_attention_over_latents_has_to_do(script: Script) -> None:
    """576 numbers of a row are read once for all heads, and 512 of them are values."""
    latents = script("latents")
    for heads, itemsize, cache_dtype in ((16, 2, "auto"), (128, 1, "f8e4m3")):
        problem = latents.problem_of(heads, 3, cache_dtype)
        call = latents.attention_call(problem, "3 x 100", (100,) * 3)
        assert call.bytes == 300 * 576 * itemsize
        assert call.flop == 300 * heads * 2 * (576 + 512)
    assert [latents.class_of(tokens) for tokens in (1, 2, 17, 64, 65)] == [
        (1, 1),
        (2, 16),
        (17, 32),
        (33, 64),
        (65, 8192),
    ]
    assert len({case.call.name for case in latents.cases()}) == len(list(latents.cases())) == 24


@interpreted
def test_attention_over_latents(on_cpu: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = on_cpu("latents")
    for name, size in (("LATENT", 16), ("ROTATED", 8)):
        monkeypatch.setattr(latents, name, size)
    problem = replace(latents.problem_of(4, 2, "auto"), kv_heads=2, group=2, sharing=2, dtype="f32")
    assert latents.measure_attention(MACHINE, problem, (20, 1), Pool()) == {"triton": [1e-3 / 2] * 11}


@interpreted
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_matmuls_of_heads(on_cpu: Script, tokens: int, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = on_cpu("latents")
    monkeypatch.setattr(latents, "TRAFFIC", 1 << 10)
    case = latents.Case(2, 24, 40, tokens, turned, "f32")
    assert latents.measure_matmul(MACHINE, case) == dict.fromkeys(("triton", "cublas"), [1e-3 / 4] * 11)


@pytest.mark.parametrize(("fed", "before"), drawn(1, [(70, 0), (40, 30)]))
def test_what_latent_attention_of_prompts_has_to_do(script: Script, fed: int, before: int) -> None:
    """Against counting every pair."""
    case = script("latent_prompts").Case("x", 3, fed, before, 24, 10, 6, 12)
    pairs = sum(key <= before + query for query in range(fed) for key in range(before + fed))
    assert case.call.flop == 2 * 3 * (pairs * (10 + 6 + 12) + fed * 24 * (10 + 12))
    assert case.call.bytes == 2 * ((fed + before) * 30 + fed * 3 * (10 + 6 + 12))


@interpreted
@pytest.mark.parametrize(("fed", "before"), [(70, 0), (40, 30)])
def test_latent_attention_of_prompts(on_cpu: Script, fed: int, before: int) -> None:
    """Both forms, without and with tokens before the step."""
    prompts = on_cpu("latent_prompts")
    case = prompts.Case("x", 3, fed, before, 24, 10, 6, 12, torch.float32)
    assert prompts.measure(MACHINE, case) == dict.fromkeys(("latents", "expanded"), [1e-3 / 4] * 11)


@interpreted
def test_wrong_kernels_of_latents_are_no_figure(on_cpu: Script, wrong: None, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = on_cpu("latents")
    monkeypatch.setattr(latents, "TRAFFIC", 1 << 10)
    problem = replace(latents.problem_of(2, 1, "auto"), dtype="f32")
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        latents.measure_attention(MACHINE, problem, (40,), Pool())
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        latents.measure_matmul(MACHINE, latents.Case(2, 24, 40, 3, True, "f32"))


STEPS = (((300, 0), (1, 40), (20, 30)), ((7, 9),))


@pytest.mark.parametrize("sequences", STEPS)
def test_what_attention_of_prompts_has_to_do(script: Script, sequences: tuple[tuple[int, int], ...]) -> None:
    """Against counting every pair."""
    prefill = script("prefill")
    call = prefill.Case("x", prefill.Heads(4, 2, 16), sequences).call
    pairs = sum(
        key <= before + query for fed, before in sequences for query in range(fed) for key in range(before + fed)
    )
    assert call.flop == pairs * 4 * (16 + 16) * 2  # a product and a sum for each element of a key, and of a value
    read = sum(fed * 4 * 16 * 2 + (before + fed) * 2 * 2 * 16 for fed, before in sequences)
    assert call.bytes == read * 2


@pytest.mark.parametrize("sequences", STEPS)
def test_attention_of_prompts(
    on_cpu: Script, sequences: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's wrapper computes the attention of the steps, and so does what stands in for our kernel."""
    prefill = on_cpu("prefill")
    peer_flashinfer.install(monkeypatch)
    case = prefill.Case("x", prefill.Heads(4, 2, 16), sequences, scattered=len(sequences) > 1)
    kept: dict[torch.Tensor, torch.Tensor] = {}

    def run(q: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        result = kept.setdefault(q, torch.empty_like(q))  # where a graph's memory is
        return [result.copy_(paged_attention.reference(q, *rest, scale=16**-0.5))]

    times = prefill.measure(case, {"triton": run}, True, 1)
    assert times == {"triton": [1e-3 / 2] * 11, "flashinfer": [1e-3 / 2] * 11}
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        prefill.measure(case, {"triton": lambda *inputs: [run(*inputs)[0].mul_(1.1)]}, True, 1)


def test_results_that_are_not_compared_are_computed(on_cpu: Script) -> None:
    """Of a long chunk the first tokens are not compared; to leave them out is found all the same."""
    prefill = on_cpu("prefill")
    case, kept = prefill.Case("x", prefill.Heads(2, 1, 16), ((prefill.CHECKED + 40, 0),)), {}

    def run(q: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        result = kept.setdefault(q, torch.zeros_like(q))
        result[40:] = paged_attention.reference(q, *rest, scale=16**-0.5)[40:]
        return [result]

    with pytest.raises(RuntimeError, match="a part of the result was not computed"):
        prefill.measure(case, {"triton": run}, False, 1)


def test_a_kernel_that_is_refused_is_missing(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds, target = script("prefill_builds"), Target.named("sm_80")
    monkeypatch.setattr(builds.Target, "detect", lambda device: target)
    monkeypatch.setattr("ingot.backends.flashinfer.emit.find_packages", lambda: Missing("nvcc was not found"))
    monkeypatch.setattr(builds, "contenders", lambda sm: ("fa2",))
    for _ in range(2):  # the second one finds what the first one left
        builds.emit(builds.Heads(32, 8, 128), "fa2", tmp_path / "fa2")
    assert builds.load_all(80, tmp_path) == ({}, {"fa2": "nvcc was not found"})


def test_what_a_sparse_step_has_to_do(script: Script) -> None:
    """The indexer reads every key of 128 numbers, and attention 2048 rows of 576 for each token."""
    latents = script("latents")
    (choose, _, step), *attentions = latents.sparse_steps()
    read = 32 * 16384 * 128 * 2
    least = step.call(choose, "x")
    assert read < least.bytes < 1.01 * read and least.flop == 2 * 32 * 16384 * 64 * 128
    for (op, _, step), heads in zip(attentions, (16, 128), strict=True):
        call = step.call(op, "x")
        rows = 32 * 2048 * 576 * 2
        assert call.bytes == rows + 32 * (heads * (576 + 512) * 2 + 2048 * 4)
        assert call.flop == 32 * 2048 * heads * 2 * (576 + 512)


@interpreted
@pytest.mark.parametrize("op", ["paged_choose_positions", "sparse_attention"])
def test_sparse_steps(on_cpu: Script, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts above and below what is chosen."""
    sparse = on_cpu("sparse_decode")
    step = sparse.SparseStep((41, 9), 3, 20, 2, 8, 16, 8, dtype="f32", bucket=(2, 16))
    assert sparse.measure(MACHINE, step, op) == {"triton": [1e-3 / 4] * 11}


@interpreted
@pytest.mark.parametrize("op", ["paged_choose_positions", "sparse_attention"])
def test_wrong_sparse_steps_are_no_figure(on_cpu: Script, wrong: None, op: str) -> None:
    sparse = on_cpu("sparse_decode")
    step = sparse.SparseStep((41,), 3, 20, 2, 8, 16, 8, dtype="f32", bucket=(2, 16))
    with pytest.raises(RuntimeError, match="the result is wrong by"):
        sparse.measure(MACHINE, step, op)
