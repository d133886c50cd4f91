"""The paged cache of a real model under stress: pages in any order, a pool too small for all, poison in what is free.

With `deterministic=True` every result is bitwise what an ample, tidy pool gives. In the normal mode a row's bits depend
on its batch, so there logits are compared by the tolerance table, as far as the tokens agree.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn

from ingot import LLM, SamplingParams
from ingot.ir.errors import GenerationError
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.numerics.tolerances import compare
from ingot.runtime.engines.engine import Engine, EngineRequest
from ingot.runtime.loading.loader import Loaded, load_artifact
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.prefix_cache import PrefixCacheStats
from ingot.runtime.pages.sequence_pages import one_pool
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig
from ingot.runtime.steps.executor import StepHandle
from ingot.runtime.steps.step import StepInputs

# One worker, for the artifacts that tests share.
pytestmark = [pytest.mark.xdist_group("stress"), pytest.mark.one_in_file(3)]

NAME = "qwen3-biased"
AMPLE, SMALL = 96, 9  # pages; eight requests of up to 5 pages each need 35
NEW_TOKENS = 36
# Layers of a float32 model amplify rounding: the table's tolerance is for one op.
DEPTH_FACTOR = 10.0

# Seeds of their own, so that what is drawn does not depend on the order of requests.
GREEDY = [SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)] * 8
SEEDED = [
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=100 + index, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index in range(8)
]


def some_prompts() -> list[list[int]]:
    lengths = (5, 31, 16, 40, 1, 17, 25, 33)
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 409, (length,), generator=generator).tolist() for length in lengths]


def alike_prompts() -> list[list[int]]:
    """Eight that begin like one another, for none to two and a half pages, and one of them twice."""
    trunk = some_prompts()[3]
    return [
        trunk[:33],
        [*trunk, 5],
        trunk[:32],
        trunk[:16],
        [7, *trunk],
        [*trunk[:20], 1, 2, 3],
        trunk[:17],
        trunk[:33],
    ]


@dataclass
class Recorder:
    """An executor that keeps the logits from which each token was chosen, by (request, tokens before it)."""

    loaded: Loaded
    scheduler: Scheduler
    logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def launch(self, inputs: StepInputs) -> StepHandle:
        handle = self.loaded.executor.launch(inputs)
        batch = self.scheduler._in_flight[-1]  # scheduled just before it is launched
        for row, request in enumerate(batch.sampled):
            number = int(request.request_id.partition("[")[0])
            self.logits[number, request.num_computed] = handle.outputs["logits"][row].clone()
        return handle


@dataclass
class Served:
    """What eight requests gave: tokens, the logits behind them, preemptions, and what the prefix cache did."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    reasons: list[str | None]
    logits: Mapping[tuple[int, int], torch.Tensor]
    preemptions: int
    cached: PrefixCacheStats


def caches(loaded: Loaded) -> list[torch.Tensor]:
    return [loaded.executor.states[name] for name, state in loaded.plan.states.items() if state.kind == "paged_kv"]


def serve(
    artifact: Path,
    params: Sequence[SamplingParams],
    *,
    num_pages: int,
    prompts: Sequence[list[int]] | None = None,
    prefix_caching: bool = True,
    chunked: bool = False,
    permute_seed: int | None = None,
    poison: bool = False,
    max_batch: int = 8,
) -> Served:
    """Serve `prompts`, else `some_prompts()`, together; with `poison`, whatever is not written is NaN, pages that are
    worth nothing any more included."""
    prompts = prompts or some_prompts()
    loaded = load_artifact(artifact, num_pages=num_pages)

    def fill(pages: Sequence[int]) -> None:
        for cache in caches(loaded):
            cache[list(pages)] = float("nan")

    if poison:
        fill(range(num_pages))
    limits = loaded.limits
    config = SchedulerConfig(
        max_batch=max_batch,
        max_tokens=24 if chunked else limits.max_tokens,
        max_seq_len=limits.max_seq_len,
        page_size=limits.page_size,
        chunked_prefill=chunked,
        prefix_caching=prefix_caching,
    )
    pool = PagePool(num_pages, limits.page_size, permute_seed=permute_seed, on_release=fill if poison else None)
    scheduler = Scheduler(config, one_pool(pool))
    recorder = Recorder(loaded, scheduler)
    engine = Engine(recorder, scheduler, vocab_size=limits.vocab_size, eos_token_ids=())
    engine.add_requests(
        [
            EngineRequest(str(number), prompt, one, stream=False)
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
    )
    outputs = {}
    while engine.has_unfinished():
        outputs.update({int(output.request_id): output.outputs[0] for output in engine.step()})
    assert pool.num_free == num_pages
    pool.forget_all()
    if poison:
        assert all(bool(cache.isnan().all()) for cache in caches(loaded)), "a page was written after it was freed"
    return Served(
        prompts=list(prompts),
        tokens=[outputs[number].token_ids for number in sorted(outputs)],
        reasons=[outputs[number].finish_reason for number in sorted(outputs)],
        logits=recorder.logits,
        preemptions=scheduler.num_preemptions,
        cached=scheduler.prefix_cache_stats,
    )


def assert_same(found: Served, expected: Served) -> None:
    """Bitwise."""
    assert found.tokens == expected.tokens
    assert found.reasons == expected.reasons == ["length"] * 8
    for key in expected.logits:
        assert torch.equal(found.logits[key], expected.logits[key]), f"logits of request {key[0]} at {key[1]}"


def assert_near(found: Served, expected: Served) -> None:
    """Logits by tolerance, for as long as a request has been given the same tokens."""
    assert found.reasons == expected.reasons == ["length"] * 8
    compared = 0
    for number, prompt in enumerate(expected.prompts):
        for step in range(NEW_TOKENS):
            if found.tokens[number][:step] != expected.tokens[number][:step]:
                break
            key = number, len(prompt) + step
            problem = compare(found.logits[key], expected.logits[key], torch.float32, factor=DEPTH_FACTOR)
            assert problem is None, f"logits of request {number} at {key[1]}: {problem}"
            compared += 1
    assert compared >= 8 * NEW_TOKENS * 3 // 4, f"only {compared} steps had the same tokens before them"


@pytest.fixture(scope="session")
def deterministic(artifact: Callable[..., Path]) -> Path:
    return artifact(NAME, backend="reference", deterministic=True)


@pytest.fixture(scope="session")
def ample(deterministic: Path) -> Callable[[str], Served]:
    """Eight requests in a tidy pool that holds all of them, in deterministic mode, by "greedy" or "seeded"."""
    known: dict[str, Served] = {}

    def get(kind: str) -> Served:
        if kind not in known:
            known[kind] = serve(deterministic, PARAMS[kind], num_pages=AMPLE)
            assert known[kind].preemptions == 0
        return known[kind]

    return get


PARAMS = {"greedy": GREEDY, "seeded": SEEDED}
by_work = pytest.mark.parametrize(("kind", "chunked"), drawn(1, itertools.product(["greedy", "seeded"], [False, True])))
normal_backends = pytest.mark.parametrize("backend", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])


def forced(artifact: Path, *, seed: int | None, chunk: int | None, poison: bool = False) -> list[torch.Tensor]:
    loaded = load_artifact(artifact, num_pages=AMPLE)
    if poison:
        for cache in caches(loaded):
            cache.fill_(float("nan"))
    run = lambda inputs: loaded.executor.launch(inputs).outputs  # noqa: E731
    return teacher_forced(loaded.executor.inputs, run, some_prompts(), chunk=chunk, pages=AMPLE, seed=seed)


@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "chunked"])
def test_page_order_does_not_show(deterministic: Path, chunk: int | None) -> None:
    tidy = forced(deterministic, seed=None, chunk=None)
    for seed in (1, 2, 3):
        for rows, expected in zip(forced(deterministic, seed=seed, chunk=chunk, poison=True), tidy, strict=True):
            assert torch.equal(rows, expected)


@normal_backends
def test_page_order_does_not_show_in_normal_mode(backend: str, artifact: Callable[..., Path]) -> None:
    normal = artifact(NAME, backend=backend)
    tidy = forced(normal, seed=None, chunk=None)
    for chunk in (None, 5):
        for rows, expected in zip(forced(normal, seed=1, chunk=chunk, poison=True), tidy, strict=True):
            assert compare(rows, expected, torch.float32, factor=DEPTH_FACTOR) is None


@by_work
def test_preemption_changes_no_token(
    deterministic: Path, ample: Callable[[str], Served], kind: str, chunked: bool
) -> None:
    served = serve(deterministic, PARAMS[kind], num_pages=SMALL, chunked=chunked)
    print(f"{kind}, chunked {chunked}: {served.preemptions} preemptions")
    assert served.preemptions >= 3
    assert_same(served, ample(kind))


@by_work
def test_poison_in_permuted_pages_is_never_read(
    deterministic: Path, ample: Callable[[str], Served], kind: str, chunked: bool
) -> None:
    for num_pages in (SMALL, 2 * SMALL):
        served = serve(
            deterministic, PARAMS[kind], num_pages=num_pages, chunked=chunked, permute_seed=num_pages, poison=True
        )
        print(f"{kind}, chunked {chunked}, {num_pages} pages: {served.preemptions} preemptions")
        assert served.preemptions >= 1
        assert_same(served, ample(kind))


@pytest.mark.parametrize("max_batch", [1, 3])
def test_batch_composition_does_not_show(deterministic: Path, ample: Callable[[str], Served], max_batch: int) -> None:
    served = serve(deterministic, SEEDED, num_pages=AMPLE, max_batch=max_batch, poison=True, permute_seed=5)
    assert_same(served, ample("seeded"))


@normal_backends
@by_work
def test_normal_mode_under_stress(
    backend: str, kind: str, chunked: bool, artifact: Callable[..., Path], ample: Callable[[str], Served]
) -> None:
    normal = artifact(NAME, backend=backend)
    tidy = serve(normal, PARAMS[kind], num_pages=AMPLE)
    assert tidy.preemptions == 0
    assert_near(tidy, ample(kind))
    served = serve(normal, PARAMS[kind], num_pages=SMALL, chunked=chunked, permute_seed=3, poison=True)
    assert served.preemptions >= 3
    assert_near(served, tidy)


@pytest.mark.parametrize("num_pages", [AMPLE, SMALL])
def test_shared_pages_change_no_bit(deterministic: Path, num_pages: int) -> None:
    """What another sequence has computed, in other chunks, is bitwise what this one would have."""
    alike = alike_prompts()
    params = [replace(one, repetition_penalty=1.3, presence_penalty=0.2) if one.seed % 2 else one for one in SEEDED]
    alone = serve(deterministic, params, num_pages=AMPLE, prompts=alike, prefix_caching=False)
    # Fewer rows than requests: later ones find what those before them have left.
    served = serve(
        deterministic,
        params,
        num_pages=num_pages,
        prompts=alike,
        chunked=True,
        permute_seed=2,
        poison=True,
        max_batch=3,
    )
    print(f"{num_pages} pages: {served.preemptions} preemptions, {served.cached}")
    assert alone.cached.hits == 0 and served.cached.hits >= 32 and (served.preemptions > 0) == (num_pages == SMALL)
    assert_same(served, alone)


@normal_backends
def test_shared_pages_in_normal_mode(backend: str, artifact: Callable[..., Path]) -> None:
    normal, alike = artifact(NAME, backend=backend), alike_prompts()
    alone = serve(normal, GREEDY, num_pages=AMPLE, prompts=alike, prefix_caching=False)
    served = serve(normal, GREEDY, num_pages=AMPLE, prompts=alike, permute_seed=4, poison=True, max_batch=3)
    assert served.cached.hits >= 32
    assert_near(served, alone)


def test_llm_finds_a_conversation_again(deterministic: Path) -> None:
    prompt, params = some_prompts()[3], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    off, on = (
        LLM(deterministic, num_kv_pages=AMPLE, enable_prefix_caching=False),
        LLM(deterministic, num_kv_pages=AMPLE),
    )
    found = []
    for llm in (off, on):
        (first,) = llm.generate([prompt], params)
        longer = [*prompt, *first.outputs[0].token_ids, 3]
        (second,) = llm.generate([longer], params)
        found.append((first.outputs, second.outputs))
        assert llm.prefix_cache_stats.hits == second.num_cached_tokens == (0 if llm is off else 64)
    assert found[0] == found[1]
    assert on.reset_prefix_cache() and on.generate([prompt], params)[0].num_cached_tokens == 0


def test_llm_with_a_small_pool(deterministic: Path, ample: Callable[[str], Served]) -> None:
    llm = LLM(deterministic, num_kv_pages=SMALL)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in some_prompts()]
    outputs = llm.generate(prompts, SEEDED)
    assert llm._engine._scheduler.num_preemptions >= 3
    assert [output.outputs[0].token_ids for output in outputs] == ample("seeded").tokens


def test_poison_shows_when_it_is_read(deterministic: Path) -> None:
    """The tests above would fail if a page were taken away too early: here one is."""
    loaded = load_artifact(deterministic, num_pages=AMPLE)
    llm = LLM(deterministic, num_kv_pages=AMPLE)
    prompt = some_prompts()[3]
    stream = llm.stream([{"prompt_token_ids": prompt}], GREEDY[0])
    next(stream)
    (request,) = llm._engine._scheduler.running
    for name, state in loaded.plan.states.items():
        if state.kind == "paged_kv":
            llm._loaded.executor.states[name][request.pages[0][0]] = float("nan")
    with pytest.raises(GenerationError, match="not finite"):
        for last in stream:
            assert len(last.outputs[0].token_ids) < NEW_TOKENS
