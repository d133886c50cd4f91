"""A model over KV caches of eight bits on a GPU: prefill, decode, shared prefixes and graphs.

A number near a tie may be rounded to the one side or the other, by how sums were added before: so a few of many are
others than the reference's. That may move logits by a part of what rounding to eight bits moves them by, and no more.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import disagreement, rms
from gpu_model import MODEL
from scaled_checkpoint import write_scaled
from serve_artifact import teacher_forced_artifact

from ingot import LLM, RequestOutput, SamplingParams, compile_model
from ingot.runtime.loading.loader import load_artifact

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("eight_bit_cache")]
TARGET = "cuda"
LIMITS: dict[str, Any] = {"max_batch": 96, "max_tokens": 512, "max_seq_len": 256, "jobs": 4}
# Of what rounding to eight bits does to logits: so much may the few numbers do that are rounded otherwise, by the dtype
# of the cache. The largest number of an int8 row is 127 steps, so more numbers are near a tie: the C++ kernels differ
# from the references by up to 1/110 of it.
PARTS = {"fp8": 1 / 128, "int8": 1 / 32}
NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
# The caches: with the checkpoint's scales, and with scales per token.
CACHES: dict[str, dict[str, str]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8 per token": {"kv_cache_dtype": "fp8", "kv_cache_scales": "token"},
    "int8 per token": {"kv_cache_dtype": "int8", "kv_cache_scales": "token"},
}
# All tokens of a sequence at once, a few of each a step, one by one: steps of all bucket classes.
CHUNKS = (None, 15, 5, 1)


def prompts(count: int, shared: int = 48) -> list[list[int]]:
    """Prompts of many lengths that begin alike, for three pages."""
    draw = random.Random(6)
    trunk = [draw.randrange(512) for _ in range(shared)]
    return [[*trunk, *(draw.randrange(512) for _ in range(draw.randrange(1, 90)))] for _ in range(count)]


@dataclass(frozen=True)
class Model:
    """A checkpoint with scales, and the logits of sequences by the references on a CPU: with caches of eight bits in
    float32 and in bfloat16, and with caches that round nothing."""

    checkpoint: Path
    folder: Path
    cache: dict[str, str]
    sequences: list[list[int]]
    expected: torch.Tensor
    in_bf16: torch.Tensor
    unrounded: torch.Tensor

    @property
    def noise(self) -> float:
        return rms(self.expected - self.unrounded)

    @property
    def allowed(self) -> float:
        return PARTS[self.cache["kv_cache_dtype"]] * self.noise


@pytest.fixture(scope="module", params=CACHES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, cache = tmp_path_factory.mktemp("eight-bits"), CACHES[request.param]
    checkpoint, sequences = write_scaled(MODEL, folder / "checkpoint"), prompts(4)
    logits = []
    for number, (dtype, options) in enumerate((("float32", cache), ("bfloat16", cache), ("float32", {}))):
        path = folder / f"{number}.ingot"
        limits = {**LIMITS, "target": "cpu", "backend": "reference"}
        compile_model(checkpoint, path, dtype=dtype, **options, **limits)
        logits.append(torch.cat(teacher_forced_artifact(str(path), sequences, None)))
    return Model(checkpoint, folder, cache, sequences, *logits)


# The artifacts for the GPU, each compiled when a test asks for it. None takes references for attention: they stand in
# for no kernel of it.
ARTIFACTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "deterministic": {"dtype": "bfloat16", "deterministic": True},
}


@pytest.fixture(scope="module")
def made(model: Model) -> Callable[[str], Path]:
    @functools.cache
    def make(name: str) -> Path:
        path = model.folder / f"{name}.ingot"
        compile_model(model.checkpoint, path, target=TARGET, **model.cache, **ARTIFACTS[name], **LIMITS)
        return path

    return make


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_are_those_of_the_reference(model: Model, made: Callable[[str], Path], chunk: int | None) -> None:
    """However a prompt is cut: what a step feeds is rounded before it is attended to."""
    found = torch.cat(teacher_forced_artifact(str(made("float32")), model.sequences, chunk))
    error = rms(found - model.expected)
    print(f"error {error:.2e}, of eight bits {model.noise:.2e}, logits of size {rms(model.expected):.2e}")
    assert model.noise > 1e-3 * rms(model.expected), "eight bits are seen"
    assert error <= model.allowed
    found = torch.cat(teacher_forced_artifact(str(made("bfloat16")), model.sequences, chunk))
    problem = disagreement(found, model.expected, model.in_bf16, torch.bfloat16)
    assert problem is None, problem


def chosen(output: RequestOutput) -> list[float]:
    """The log-probability of each token."""
    (sequence,) = output.outputs
    assert sequence.logprobs is not None
    return [entry[token].logprob for entry, token in zip(sequence.logprobs, sequence.token_ids, strict=True)]


def agree(found: list[RequestOutput], expected: list[RequestOutput], most: float) -> None:
    """Log-probabilities that differ by `most`, as long as the tokens are the same, and they are for most of the way."""
    compared, worst = 0, 0.0
    for one, other in zip(found, expected, strict=True):
        ids = one.outputs[0].token_ids, other.outputs[0].token_ids
        same = next((place for place in range(NEW_TOKENS) if ids[0][place] != ids[1][place]), NEW_TOKENS)
        apart = [abs(left - right) for left, right in zip(chosen(one)[:same], chosen(other)[:same], strict=True)]
        compared, worst = compared + same, max([worst, *apart])
    print(f"{compared} of {len(found) * NEW_TOKENS} tokens alike, log-probabilities differ by {worst:.2e}")
    assert worst <= most
    assert compared >= len(found) * NEW_TOKENS * 3 // 4


def asked(many: int) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts(many)]


def test_tokens_of_the_engine_are_those_of_a_cpu(model: Model, made: Callable[[str], Path]) -> None:
    """By captured graphs and without, twice, so that prefixes come from the cache, and with too few pages for all.

    A log-probability may differ by what the few numbers do that are rounded otherwise, of a row at its worst."""
    expected = LLM(model.folder / "0.ingot").generate(asked(12), GREEDY)
    most = 8 * model.allowed
    for options in ({}, {"cuda_graphs": "all"}, {"cuda_graphs": "none"}, {"num_kv_pages": 24, "max_num_seqs": 6}):
        llm = LLM(made("float32"), **options)
        for _ in range(2):
            agree(llm.generate(asked(12), GREEDY), expected, most)


def test_shared_prefixes_are_read_once(model: Model, made: Callable[[str], Path]) -> None:
    alone = LLM(made("float32"), num_kv_pages=1600, disable_cascade_attn=True).generate(asked(40), GREEDY)
    llm = LLM(made("float32"), num_kv_pages=1600)
    llm._engine._scheduler._least_shared = 1
    for _ in range(2):
        agree(llm.generate(asked(40), GREEDY), alone, 8 * model.allowed)


def test_deterministic_steps_give_the_bits_that_a_request_gets_alone(made: Callable[[str], Path]) -> None:
    def bits(outputs: list[RequestOutput]) -> list[Any]:
        return [(one.outputs[0].token_ids, chosen(one)) for one in outputs]

    llm = LLM(made("deterministic"), num_kv_pages=400, enable_prefix_caching=False)
    alone = [bits(llm.generate([one], GREEDY))[0] for one in asked(12)]
    assert bits(llm.generate(asked(12), GREEDY)) == alone
    cut = LLM(made("deterministic"), num_kv_pages=400, max_num_batched_tokens=37, max_num_seqs=32)
    for _ in range(2):  # the second time from pages that are there
        assert bits(cut.generate(asked(12), GREEDY)) == alone


def test_pages_are_copied_moved_and_cleared(made: Callable[[str], Path]) -> None:
    states = load_artifact(made("bfloat16"), num_pages=8).executor.states
    caches = [states[name] for name in states if states[name].dtype in (torch.float8_e4m3fn, torch.int8)]
    assert len(caches) == 3
    g = torch.Generator().manual_seed(3)
    before = [torch.randint(0, 256, cache.shape, generator=g, dtype=torch.uint8) for cache in caches]
    for cache, numbers in zip(caches, before, strict=True):
        cache.view(torch.uint8).copy_(numbers)
    states.copy("full", [1, 2], [2, 5])
    states.move("full", [0], [6])
    states.zero("full", [4])
    for cache, numbers in zip(caches, before, strict=True):
        found = cache.view(torch.uint8).cpu()
        places = [None, 1, 1, 3, None, 2, 0, 7]
        for page, source in enumerate(places):
            assert torch.equal(found[page], torch.zeros_like(numbers[0]) if source is None else numbers[source])
