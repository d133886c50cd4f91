"""Scratch pages: long pieces of prompts in pools of a window or two give the bits of caches that keep everything.

Scratch pages are NaN between steps, and so is what is free or was given up.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drawn import drawn
from window_artifacts import caches_of, finish_steps, poison

from ingot import LLM, SamplingParams
from ingot.ir.cache.groups import CacheGroup
from ingot.runtime.pages.pool import PagePool

pytestmark = [pytest.mark.xdist_group("scratch-pages"), pytest.mark.one_in_file(3)]

WINDOW = 20
GROUP = CacheGroup.named(f"window_{WINDOW}")
LIMITS = {"max_batch": 4, "max_tokens": 112, "max_seq_len": 320, "deterministic": True}
BETWEEN = GROUP.pages_between_steps(320, 16)


def prompts() -> list[list[int]]:
    """Most are longer than a step; some begin alike, and some share a step."""
    generator = torch.Generator().manual_seed(5)
    ones = [torch.randint(0, 60, (length,), generator=generator).tolist() for length in (250, 3, 61, 130, 192, 270)]
    return [*ones, [*ones[0], 7, 8], [*ones[0][:64], 9], ones[5][:200], ones[2]]


def window_pool(llm: LLM, pages: int | None = None) -> PagePool:
    """The pool of the group with the window, of which the test holds all but so many pages."""
    scheduler = llm._engine._scheduler
    (pool,) = (pool for _, group, pool in scheduler.pages.windows if group == GROUP)
    if pages is not None:
        pool.allocate(pool.num_free - pages)
    return pool


def tokens(artifact: Path, pages: int | None = None, *, caching: bool = True) -> tuple[list[list[int]], int]:
    """The tokens of all prompts, and the scratch pages that stood in page tables."""
    llm = LLM(artifact, enable_prefix_caching=caching)
    poison(llm)
    taken = 0
    for _, _, pool in llm._engine._scheduler.pages.windows:
        take = pool.take_scratch

        def counted(count: int, take: object = take) -> list[int]:
            nonlocal taken
            taken += count
            return take(count)  # type: ignore[operator,no-any-return]

        pool.take_scratch = counted  # type: ignore[method-assign]
    if pages is not None:
        window_pool(llm, pages)
    params = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=30, ignore_eos=True)
        for index in range(len(prompts()))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params)
    return [output.outputs[0].token_ids for output in outputs], taken


@pytest.fixture(scope="module")
def expected(both: tuple[Path, Path]) -> Iterator[list[list[int]]]:
    found, taken = tokens(both[1], caching=False)
    assert taken == 0, "caches that keep every token have no scratch pages"
    yield found


# Of one sequence at a time; of two of them; of all, where pieces of several prompts share a step.
@pytest.mark.parametrize(
    ("pages", "caching"),
    drawn(1, itertools.product([BETWEEN, 2 * BETWEEN, 3 * BETWEEN, 4 * BETWEEN + 3], [True, False])),
)
def test_tokens_are_those_of_whole_caches(
    both: tuple[Path, Path], expected: list[list[int]], pages: int, caching: bool
) -> None:
    found, taken = tokens(both[0], pages, caching=caching)
    assert found == expected
    assert taken > 0


def test_every_long_piece_uses_scratch_pages(both: tuple[Path, Path]) -> None:
    llm = LLM(both[0])
    pool, pieces = window_pool(llm, 2 * BETWEEN), []
    take = llm._engine._scheduler.pages.take

    def watched(request: object, num_tokens: int, **how: bool) -> None:
        take(request, num_tokens, **how)  # type: ignore[arg-type]
        if how.get("feeding"):
            pieces.append((num_tokens, pool._in_scratch))

    llm._engine._scheduler.pages.take = watched  # type: ignore[method-assign]
    llm.generate([{"prompt_token_ids": prompts()[5]}], SamplingParams(max_tokens=1))
    assert pieces == [(112, 4), (224, 4), (270, 0)], "of 7 pages the last 3 stay"


def test_a_second_turn_finds_its_prefix(both: tuple[Path, Path]) -> None:
    llm = LLM(both[0])
    window_pool(llm, 2 * BETWEEN)
    first = [3 * place % 60 for place in range(280)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": first}], params)
    (again,) = llm.generate([{"prompt_token_ids": first}], params)
    assert again.num_cached_tokens == 272 and again.outputs[0].token_ids == answer.outputs[0].token_ids
    (answer,) = llm.generate([{"prompt_token_ids": [*first, *answer.outputs[0].token_ids, 1, 2, 3]}], params)
    assert answer.num_cached_tokens == 288, "of 295 tokens that were computed"


def test_caches_of_a_group_have_scratch_pages_in_common(both: tuple[Path, Path]) -> None:
    llm = LLM(both[0])
    caches, scratch = caches_of(llm, GROUP), llm._loaded.scratch_pages[GROUP.name]
    assert len(scratch) == (112 - WINDOW) // 16 and {cache.shape[0] for cache in caches} == {scratch.stop}
    assert len({cache.data_ptr() for cache in caches}) == len(caches)
    own = llm._loaded.pages[GROUP.name]
    for number, writer in enumerate(caches, 1):
        writer[:own].fill_(number)
        writer[scratch.start :].fill_(-number)
        finish_steps()
        for reader in caches:
            assert bool((reader[scratch.start :] == -number).all())
    for number, cache in enumerate(caches, 1):
        assert bool((cache[:own] == number).all()), "the pages of the pool are its own"
