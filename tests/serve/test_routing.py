"""Which replica a request goes to: properties of the choice, the memory of prompts, and the share of cached tokens."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.serve.engine.routing import MOST_HASHED, Candidate, RecentBlocks, Router, choose, hash_blocks

PAGE = 4


def candidates() -> st.SearchStrategy[list[Candidate]]:
    parts = st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 9))
    return st.lists(parts, min_size=1, max_size=6).map(
        lambda drawn: [Candidate(index, *part) for index, part in enumerate(drawn)]
    )


@settings(deadline=None)
@given(candidates(), st.integers(20, 30), st.integers(0, 64))
def test_the_choice(given: list[Candidate], blocks: int, bound: int) -> None:
    """It is within the bound, and none within it is better."""
    lowest = min(one.load for one in given)
    chosen = given[choose(given, blocks, bound)]
    assert chosen.load - lowest <= bound * chosen.blocks / blocks
    for other in given:
        if other.load - lowest <= bound * other.blocks / blocks:
            assert (other.blocks, -other.load, -other.turn) <= (chosen.blocks, -chosen.load, -chosen.turn)


@settings(deadline=None)
@given(candidates(), st.integers(0, 64))
def test_without_a_known_prefix_the_least_loaded_is_chosen(given: list[Candidate], bound: int) -> None:
    plain = [Candidate(one.index, one.load, 0, one.turn) for one in given]
    assert given[choose(plain, 20, bound)].load == min(one.load for one in given)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.sampled_from(["", "a"]))
def test_equal_blocks_have_equal_hashes(one: list[int], other: list[int], salt: str) -> None:
    mine, others = hash_blocks(one, None, PAGE), hash_blocks(other, salt, PAGE)
    equal = 0
    while not salt and one[: equal + PAGE] == other[: equal + PAGE] and equal + PAGE <= min(len(one), len(other)):
        equal += PAGE
    shared = [a == b for a, b in zip(mine, others, strict=False)]
    assert sum(shared) == equal // PAGE and shared == sorted(shared, reverse=True)


def test_of_a_long_prompt_the_first_blocks_are_hashed() -> None:
    assert len(hash_blocks(range(10 * MOST_HASHED), None, 2)) == MOST_HASHED


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12), st.integers(1, 12))
def test_recent_blocks_are_whole_prefixes(prompts: list[list[int]], most: int) -> None:
    """As a plain least-recently-used set, whose lookup looks at each block."""
    recent, model = RecentBlocks(), OrderedDict[bytes, None]()
    for prompt in prompts:
        hashes = hash_blocks(prompt, None, 1)
        known = 0
        while known < len(hashes) and hashes[known] in model:
            known += 1
        assert recent.count(hashes) == known
        recent.add(hashes, most)
        for one in reversed(hashes):
            model[one] = None
            model.move_to_end(one)
        while len(model) > most:
            model.popitem(last=False)
        assert len(recent) == len(model) <= most


def test_requests_without_a_common_prefix_take_turns() -> None:
    router = Router(3, PAGE)
    chosen = [router.route([number] * 8, None, {0: 0, 1: 0, 2: 0}, 8, 0) for number in range(6)]
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == [0, 1, 2]


def test_a_conversation_stays_until_its_replica_has_too_much_to_do() -> None:
    router = Router(2, PAGE)
    first = router.route([1] * 40, None, {0: 0, 1: 0}, 8, 0)
    other = 1 - first
    assert router.route([1] * 44, None, {first: 7, other: 0}, 8, 0) == first, "10 of 11 blocks are known"
    assert router.route([1] * 44, None, {first: 8, other: 0}, 8, 0) == first, "all are"
    assert router.route([1] * 44, None, {first: 9, other: 0}, 8, 0) == other
    assert router.route([1] * 44, "another salt", {first: 1, other: 0}, 8, 0) == other
    router.forget(first)
    assert router.route([1] * 44, None, {first: 0, other: 0}, 8, 0) == other, "its cache has become empty"
    assert router.route([1] * 44, None, {first: 0}, 8, 0) == first, "the other one is not ready"


def test_a_replica_is_as_forgetful_as_its_cache() -> None:
    router = Router(2, PAGE)
    first = router.route([1] * 40, None, {0: 0, 1: 0}, 8, pages=10)
    router.route([2] * 40, None, {first: 0}, 8, pages=10)
    assert router.route([1] * 40, None, {first: 1, 1 - first: 0}, 8, pages=10) == 1 - first


Route = Callable[[Sequence[int], dict[int, int]], int]


def cached_share(route: Route, replicas: int, seed: int, most: int, at_once: int) -> tuple[float, float]:
    """The share of prompt tokens that replicas find in caches of `most` pages, and the highest excess of a load.

    Conversations of some turns share one of a few system prompts; `at_once` requests are in flight at a time.
    """
    draw = random.Random(seed)
    systems = [[draw.randrange(1000) for _ in range(64)] for _ in range(4)]
    caches = [RecentBlocks() for _ in range(replicas)]
    loads = dict.fromkeys(range(replicas), 0)
    talks: list[list[int]] = []
    running: list[int] = []
    hits = total = excess = 0
    for _ in range(600):
        if len(running) == at_once:
            loads[running.pop(draw.randrange(at_once))] -= 1
        if len(talks) < 40 or draw.random() < 0.1:
            talks.append([*draw.choice(systems)])
            talks = talks[-60:]
        prompt = draw.choice(talks)
        prompt += (draw.randrange(1000) for _ in range(draw.randrange(8, 60)))
        index = route(prompt, loads)
        hashes = hash_blocks(prompt, None, PAGE)
        hits, total = hits + caches[index].count(hashes), total + len(hashes)
        caches[index].add(hashes, most)
        loads[index] += 1
        running.append(index)
        excess = max(excess, loads[index] - min(loads.values()))
        prompt += (draw.randrange(1000) for _ in range(draw.randrange(8, 60)))  # the answer
    return hits / total, excess


@pytest.mark.parametrize(("replicas", "at_once"), [(2, 1), (2, 16), (4, 32)])
def test_replicas_find_nine_tenths_of_what_one_finds(replicas: int, at_once: int) -> None:
    """One replica has the cache of all together. Least loaded replicas without affinity find much less."""
    pages, bound = 12_000, 16
    router, blind, single = Router(replicas, PAGE), Router(replicas, PAGE), Router(1, PAGE)
    found, excess = cached_share(
        lambda prompt, loads: router.route(prompt, None, loads, bound, pages), replicas, 5, pages, at_once
    )
    least, _ = cached_share(lambda _, loads: blind.route([], None, loads, bound, pages), replicas, 5, pages, at_once)
    one, _ = cached_share(
        lambda prompt, loads: single.route(prompt, None, loads, bound, 0), 1, 5, replicas * pages, at_once
    )
    assert found >= 0.9 * one and least < 0.9 * one, (found, least, one)
    assert excess <= bound + 1
