"""Scratch pages of windows, on the fake device, which poisons them after each step: what one step alone reads."""

import random
from typing import Any

import pytest
from served import GREEDY, Served

from ingot.ir.cache.groups import CacheGroup
from ingot.ir.errors import InternalError
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.params.sampling_params import SamplingParams

WINDOW = CacheGroup.named("window_8")
BETWEEN = WINDOW.pages_between_steps(1000, 4)
# What a sequence holds that is fed in long pieces: the window that a piece reads, and the one that it leaves.
IN_STEP = 2 * BETWEEN


def served(pages: int = IN_STEP, lifetime: str = "window_8", **options: Any) -> Served:
    given = {"num_pages": 200, "max_tokens": 64, "max_seq_len": 400, "with_scratch": True, **options}
    return Served(lifetimes={lifetime: 1 + pages}, **given)


def drawn(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed + place).randrange(1, 900) for place in range(length)]


def pieces(one: Served) -> list[int]:
    """The tokens of each step until nothing is left."""
    sizes: list[int] = []
    launch = one.device.launch

    def counted(inputs: Any) -> Any:
        sizes.append(inputs.sizes.T)
        return launch(inputs)

    one.device.launch = counted  # type: ignore[method-assign]
    one.drain()
    return sizes


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("kind", ["window", "chunked"])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_step_has_as_many_as_its_pieces_need(kind: str, size: int, page_size: int) -> None:
    group = CacheGroup.named(f"{kind}_{size}")
    for tokens in range(1, 40):
        most = 0
        for start in range(2 * size * page_size):
            boundary = (start + tokens - 1) // page_size * page_size
            most = max(most, group.first_page(boundary, page_size) - -(-start // page_size))
        assert most <= group.pages_read_at_once(tokens, page_size) <= most + 1
        for first in range(1, tokens):
            parts = (group.pages_read_at_once(part, page_size) for part in (first, tokens - first))
            assert sum(parts) <= group.pages_read_at_once(tokens, page_size)


def test_a_long_prompt_is_fed_in_whole_pieces_in_a_small_pool() -> None:
    small = served()
    prompt = drawn(300)
    small.engine.add_request("a", prompt, GREEDY)
    assert pieces(small)[:5] == [64, 64, 64, 64, 44]
    assert small.device.num_in_scratch > 40
    without = served(with_scratch=False)
    without.engine.add_request("a", prompt, GREEDY)
    assert max(pieces(without)) < 32 and without.device.num_in_scratch == 0


def test_a_long_prompt_leaves_sequences_that_decode_their_next_pages() -> None:
    """Each of the others fills its pages in the step that feeds the long prompt, which fits into what is left."""
    others, pages = 6, 24
    one = served(pages, max_batch=others + 1, max_tokens=120)
    for number in range(others):
        one.engine.add_request(str(number), drawn(8, number), GREEDY)
    one.engine.add_request("long", drawn((pages - 2 * others) * 4, 90), GREEDY)
    one.drain()
    assert one.device.num_in_scratch > 0 and one.scheduler.num_preemptions == 0


def test_pages_of_the_pool_are_taken_while_there_are_enough() -> None:
    large = served(100)
    prompt = drawn(60)
    large.engine.add_request("a", prompt, GREEDY)
    large.drain()
    assert large.device.num_in_scratch == 0
    large.engine.add_request("b", [*prompt[:33], 1, 2, 3], GREEDY)
    assert large.drain()["b"].num_cached_tokens == 32, "a place in the middle of a piece"


def test_tokens_are_right_and_a_second_turn_finds_its_prefix() -> None:
    one = served()
    for length in range(200, 217):  # the end falls anywhere in its page
        prompt = drawn(length, length)
        one.engine.add_request("a", prompt, GREEDY)
        answer = one.drain()["a"].outputs[0].token_ids
        assert answer == one.expected(prompt, GREEDY)
        one.engine.add_request("same", prompt, GREEDY)
        assert one.drain()["same"].num_cached_tokens == (length - 1) // 4 * 4
        second = [*prompt, *answer, 5, 6]
        one.engine.add_request("b", second, GREEDY)
        told = one.drain()["b"]
        assert told.num_cached_tokens == (length + 7) // 4 * 4
        assert told.outputs[0].token_ids == one.expected(second, GREEDY)


def test_several_prompts_in_one_step_have_scratch_pages_of_their_own() -> None:
    one = served(4 * IN_STEP, prefix_caching=False, max_tokens=120)
    one.scheduler.pages.pools[1].allocate(2 * IN_STEP)  # others hold them
    asked = {str(number): drawn(length, 400 * number) for number, length in enumerate((50, 38, 90))}
    for name, prompt in asked.items():
        one.engine.add_request(name, prompt, GREEDY)
    outputs = {}
    while one.engine.has_unfinished():
        outputs |= {output.request_id: output for output in one.engine.step()}
    assert one.device.most_sequences == 3 and one.device.num_in_scratch > 20
    for name, prompt in asked.items():
        assert outputs[name].outputs[0].token_ids == one.expected(prompt, GREEDY)


def test_a_prompt_that_may_not_be_cut_is_admitted_by_what_it_leaves() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    one = served(IN_STEP, chunked_prefill=False, max_tokens=200)
    one.engine.add_request("a", drawn(190), params)
    assert pieces(one)[0] == 190


def test_a_step_without_memory_is_cut_otherwise_the_next_time() -> None:
    one = served(max_batch=2)
    one.device.has_memory = lambda inputs: inputs.sizes.B == 1
    # The first one stays, and is fed again what scratch pages stood for; the other one is preempted.
    asked = {"a": drawn(50), "b": drawn(90, 7)}
    for name, prompt in asked.items():
        one.engine.add_request(name, prompt, GREEDY)
    outputs = one.drain()
    assert one.device.num_refused > 0 and one.device.num_in_scratch > 0
    for name, prompt in asked.items():
        assert outputs[name].outputs[0].token_ids == one.expected(prompt, GREEDY)


def test_a_request_waits_for_the_end_of_a_piece_and_not_for_its_middle() -> None:
    prompt = drawn(64)
    for other, found in ((prompt, 64), (prompt[:40], 0)):
        one = served()
        one.engine.add_request("a", prompt, GREEDY)
        one.engine.add_request("b", [*other, *drawn(9, 90)], GREEDY)
        told = one.drain()
        assert told["b"].num_cached_tokens == found
        assert one.device.num_in_scratch > 0


def test_a_pool_gives_each_scratch_page_to_one_step_once() -> None:
    pool = PagePool(4, scratch=range(6, 9))
    assert pool.take_scratch(2) == [6, 7] and pool.take_scratch(1) == [8] and pool.take_scratch(0) == []
    with pytest.raises(InternalError, match="1 scratch pages requested, 0 left"):
        pool.take_scratch(1)
    pool.end_scratch()
    assert pool.take_scratch(3) == [6, 7, 8] and pool.num_free == 4
    with pytest.raises(InternalError, match="scratch pages from 3 on"):
        PagePool(4, scratch=range(3, 9))
