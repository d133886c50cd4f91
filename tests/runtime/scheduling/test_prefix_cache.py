"""Sequences that begin alike share pages, and nothing else changes: tokens are those of each request alone."""

import random
from dataclasses import replace

import pytest

from ingot.ir.errors import RequestError
from ingot.runtime.pages.block_hashes import BlockHashes
from ingot.runtime.pages.prefix_cache import PrefixCacheStats
from ingot.runtime.params.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = list(range(100, 114))  # three pages of 4, and two tokens


def ask(served, prompt, params=GREEDY, name="r", **given):
    """Serve one request alone, check its tokens, and give how many of its prompt's were found."""
    served.engine.add_request(name, {"prompt_token_ids": prompt, **given}, params)
    output = served.drain()[name]
    assert output.outputs[0].token_ids == served.expected(prompt, params, params.seed or 0)
    served.check_logprobs(output, params)
    return output.num_cached_tokens


def test_a_prompt_finds_the_full_pages_of_one_before_it(serve):
    served = serve()
    assert ask(served, PROMPT) == 0 and served.device.num_fed == 14 + 5
    assert ask(served, PROMPT) == 12 and served.device.num_fed == 19 + 2 + 5
    assert ask(served, [*PROMPT[:9], *range(9)]) == 8
    assert ask(served, PROMPT[1:]) == 0
    assert served.engine.prefix_cache_stats == PrefixCacheStats(queries=14 + 14 + 18 + 13, hits=12 + 8)


def test_a_prompt_that_is_all_there_feeds_its_last_page_again(serve):
    served = serve()
    for length, found in ((12, 8), (13, 12), (4, 0), (5, 4), (1, 0)):
        assert ask(served, PROMPT) in (0, 12)
        assert ask(served, PROMPT[:length]) == found


def test_outputs_are_found_too(serve):
    served = serve()
    ask(served, PROMPT)
    said = served.expected(PROMPT, GREEDY)
    # 14 + 6 tokens, of which the last was never fed.
    assert ask(served, [*PROMPT, *said, 1, 2, 3]) == 16


def test_a_stop_leaves_nothing_behind_it(serve):
    """The token behind a stop is fed before the stop is known. Where it stands, somebody else's token is found."""
    served = serve()
    said = served.expected(PROMPT, GREEDY)
    served.engine.add_request("r", PROMPT, replace(GREEDY, stop_token_ids=[said[0]]))
    served.drain()
    assert served.device.num_fed == 14 + 1
    assert ask(served, [*PROMPT, said[0], 7, 8]) == 12 and ask(served, [*PROMPT, said[0], 7, 8]) == 16


def test_off(serve):
    served = serve(prefix_caching=False)
    for _ in range(2):
        assert ask(served, PROMPT) == 0
    assert served.engine.prefix_cache_stats == PrefixCacheStats() and served.pool.num_kept == 0


def test_requests_share_pages_while_they_run(serve):
    served = serve(num_pages=12)
    params = SamplingParams(temperature=1.0, max_tokens=5, seed=1)
    served.engine.add_request("a", PROMPT, params)
    served.step()  # what is launched is there
    for index, name in enumerate("bcd"):
        served.engine.add_request(name, PROMPT, replace(params, seed=index))
    last = served.drain()
    assert served.device.most_shared == 4 and served.scheduler.num_preemptions == 0, "12 pages hold all four"
    assert [last[name].num_cached_tokens for name in "abcd"] == [0, 12, 12, 12]
    for name, seed in zip("abcd", (1, 0, 1, 2), strict=True):
        assert last[name].outputs[0].token_ids == served.expected(PROMPT, params, seed)


def test_pages_computed_side_by_side_become_one(serve):
    served = serve(max_tokens=64)
    params = replace(GREEDY, max_tokens=20)
    prompts = {name: [*PROMPT[:5], *[ord(name)] * 6] for name in "abc"}
    for name, prompt in prompts.items():
        served.engine.add_request(name, prompt, params)
    served.step()
    assert served.pool.num_held == 9, "one page of three is too little to wait for"
    served.step()
    assert served.pool.num_held == 7
    last = served.drain()
    assert all(last[name].outputs[0].token_ids == served.expected(prompt, params) for name, prompt in prompts.items())
    assert served.device.most_shared == 3 and served.pool.num_kept == 1 + 3 * ((11 + 20 - 1) // 4 - 1)


def test_a_request_waits_for_a_page_that_a_step_writes(serve):
    served = serve(max_tokens=64)
    for name in "abc":
        served.engine.add_request(name, PROMPT, GREEDY)
    served.step()
    assert len(served.scheduler.running) == 1
    served.step()
    assert len(served.scheduler.running) == 3
    last = served.drain()
    assert [last[name].num_cached_tokens for name in "abc"] == [0, 12, 12]
    assert served.device.num_fed == 14 + 2 + 2 + 3 * 5
    assert all(last[name].outputs[0].token_ids == served.expected(PROMPT, GREEDY) for name in "abc")


def test_a_request_waits_for_no_page_that_it_cannot_find(serve):
    served = serve(max_tokens=64)
    served.engine.add_request("salted", {"prompt_token_ids": PROMPT, "cache_salt": "a"}, GREEDY)
    served.engine.add_request("plain", PROMPT, GREEDY)
    served.engine.add_request("scored", PROMPT, replace(GREEDY, prompt_logprobs=0))
    served.step()
    assert len(served.scheduler.running) == 3
    served.drain()


def test_sequences_of_one_request(serve):
    served = serve(max_batch=2)
    params = SamplingParams(n=5, seed=3, max_tokens=4)
    served.engine.add_request("r", PROMPT, params)
    output = served.drain()["r"]
    for index, sequence in enumerate(output.outputs):
        assert sequence.token_ids == served.expected(PROMPT, params, 3 + index)
    assert served.engine.prefix_cache_stats == PrefixCacheStats(queries=5 * 14, hits=4 * 12)
    assert output.num_cached_tokens == 0


def test_sequences_of_one_request_hold_the_pages_of_the_prompt_once(serve):
    """While all of them run: 3 full pages of the prompt together, and one page of its end and output each."""
    served = serve(max_batch=8, num_pages=3 + 6, max_tokens=32)
    served.engine.add_request("r", PROMPT, SamplingParams(n=6, seed=3, max_tokens=2))
    held = []
    while served.engine.has_unfinished():
        served.step()
        if len(served.scheduler.running) == 6:
            pages = [one.pages[0] for one in served.scheduler.running]
            assert len({tuple(one[:3]) for one in pages}) == 1 and len({one[3] for one in pages}) == 6
            held.append(served.scheduler.pages.num_held)
    assert held and set(held) == {3 + 6} and not served.scheduler.num_preemptions


def test_a_prompt_is_hashed_once_for_all_its_sequences(serve, monkeypatch):
    """Or one request of many sequences and a long prompt holds up everybody."""
    hashed = []
    extend = BlockHashes.extend

    def counted(hashes, tokens):
        hashed.append(len(tokens))
        return extend(hashes, tokens)

    monkeypatch.setattr(BlockHashes, "extend", counted)
    served = serve()
    served.engine.add_request("r", PROMPT, SamplingParams(n=50, max_tokens=4))
    assert hashed == [len(PROMPT)]
    assert len({id(request.cached.hashes) for request in served.scheduler.waiting}) == 50


def test_salts_keep_prompts_apart(serve):
    served = serve()
    assert ask(served, PROMPT, cache_salt="a") == 0
    assert ask(served, PROMPT) == 0 and ask(served, PROMPT, cache_salt="b") == 0
    assert ask(served, PROMPT, cache_salt="a") == ask(served, PROMPT) == 12
    assert ask(served, PROMPT, cache_salt="\ud800") == 0, "any text will do"
    for salt in ("", 7, b"a", ["a"]):
        with pytest.raises(RequestError, match="cache_salt"):
            served.engine.add_request("s", {"prompt_token_ids": PROMPT, "cache_salt": salt}, GREEDY)


def test_prompts_that_are_scored_feed_what_they_score(serve):
    served = serve()
    scored = replace(GREEDY, prompt_logprobs=1)
    ask(served, PROMPT)
    assert ask(served, PROMPT, scored) == 0
    assert ask(served, PROMPT) == 12
    assert served.engine.prefix_cache_stats.queries == 2 * 14, "who may not look is not counted"


def test_penalized_requests_count_what_they_find(serve):
    served = serve()
    penalized = replace(GREEDY, repetition_penalty=1.5, max_tokens=9)
    assert ask(served, PROMPT, penalized) == 0
    assert ask(served, PROMPT, penalized) == ask(served, PROMPT) == 12
    assert ask(served, [*PROMPT, *served.expected(PROMPT, penalized)], penalized) == 20


# What must not be found.


def test_what_a_request_that_failed_has_written_is_forgotten(serve):
    served = serve()
    served.device.invalid = lambda context: len(context) > 15
    served.engine.add_request("a", PROMPT, GREEDY)
    assert served.drain()["a"].outputs[0].finish_reason == "error"
    assert served.pool.num_kept == 0
    served.device.invalid = lambda context: False
    assert ask(served, PROMPT) == 0 and ask(served, PROMPT) == 12


def test_others_keep_pages_of_one_that_failed(serve):
    served = serve(max_tokens=32)
    long = replace(GREEDY, max_tokens=20)
    served.engine.add_request("a", PROMPT, long)
    served.step()
    served.engine.add_request("b", [*PROMPT, 5], long)
    served.device.invalid = lambda context: len(context) == 16 and context[14] != 5
    last = served.drain()
    assert last["a"].outputs[0].finish_reason == "error" and last["b"].num_cached_tokens == 12
    assert last["b"].outputs[0].token_ids == served.expected([*PROMPT, 5], long)
    served.device.invalid = lambda context: False
    assert ask(served, PROMPT[:13]) == 0


def test_what_a_failed_executor_was_to_write_is_forgotten(serve):
    served = serve()
    served.device.fail_at = 2
    served.engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="on fire"):
        served.drain()
    served.device.launched.clear()
    assert served.pool.num_kept == 0 and ask(served, PROMPT) == 0


def test_a_step_that_had_no_memory_wrote_nothing(serve):
    """Of two prompts in a step, the second is preempted; neither is found before a step of it is launched."""
    served = serve(max_tokens=64)
    other = [*range(50, 64)]
    served.device.has_memory = lambda inputs: inputs.sizes.B == 1
    served.engine.add_request("a", PROMPT, GREEDY)
    served.engine.add_request("b", other, GREEDY)
    served.step()
    assert served.pool.num_kept == 0
    last = served.drain()
    for name, prompt in (("a", PROMPT), ("b", other)):
        assert last[name].num_cached_tokens == 0
        assert last[name].outputs[0].token_ids == served.expected(prompt, GREEDY)


def test_an_aborted_prompt_leaves_what_it_has_launched(serve):
    served = serve(max_tokens=6)
    served.engine.add_request("a", PROMPT, GREEDY)
    served.step()
    served.engine.abort("a")
    assert ask(served, PROMPT) == 4  # 6 of 14 tokens were fed


def test_a_page_ended_by_a_token_that_is_not_known_is_not_kept(serve):
    served = serve()
    served.engine.add_request("a", PROMPT[:3], GREEDY)
    for _ in range(2):
        served.scheduler.schedule()
    (request,) = served.scheduler.running
    assert (request.num_computed, request.num_known) == (4, 3)
    served.scheduler.abort(request.request_id)
    assert served.pool.num_kept == 0


def test_reset(serve):
    served = serve()
    served.engine.add_request("a", PROMPT, GREEDY)
    served.step()
    assert not served.engine.reset_prefix_cache()
    served.drain()
    assert served.pool.num_kept and served.engine.reset_prefix_cache() and served.pool.num_kept == 0
    assert ask(served, PROMPT) == 0


def test_reset_behind_a_stop_whose_surplus_token_is_in_flight(serve):
    served = serve()
    said = served.expected(PROMPT, GREEDY)
    served.engine.add_request("r", PROMPT, replace(GREEDY, stop_token_ids=[said[1]]))
    while not any(output.finished for output in served.step()):
        pass
    assert served.pool.num_releasing and served.engine.reset_prefix_cache() and served.pool.num_kept == 0
    served.check_empty()


# Under pressure.


def test_a_preempted_sequence_feeds_what_was_given_up_and_no_more(serve):
    served = serve(num_pages=7, max_tokens=32)
    params = replace(GREEDY, max_tokens=10)
    prompts = {"a": list(range(10)), "b": list(range(20, 30))}
    for name, prompt in prompts.items():
        served.engine.add_request(name, prompt, params)
    _, b = served.scheduler.requests.values()
    while not b.preemptions:
        served.step()
    assert (b.cached.num_lost, served.pool.num_kept) == (12, 6), "its three pages are still there"
    last = served.drain()
    for name, prompt in prompts.items():
        assert last[name].outputs[0].token_ids == served.expected(prompt, params)
    stats, fed = served.engine.prefix_cache_stats, 2 * (10 + 9)
    assert stats.hits == 0 and 0 < stats.recomputed < 12
    assert served.device.num_fed == fed + stats.recomputed


def test_the_deepest_page_goes_first(serve):
    served = serve(num_pages=8)
    ask(served, PROMPT, replace(GREEDY, max_tokens=1))  # leaves three pages
    ask(served, list(range(24)), replace(GREEDY, max_tokens=1))  # takes six, one of them from these
    assert ask(served, PROMPT, replace(GREEDY, max_tokens=1)) == 8


def beginnings(draw, count):
    """Prompts of which many begin alike, at lengths around those of pages."""
    trunk = [draw.randrange(900) for _ in range(40)]
    for _ in range(count):
        tail = [draw.randrange(3) for _ in range(draw.choice([0, 0, 1, 2, 9]))]
        yield [*trunk[: draw.choice([1, 3, 4, 8, 15, 16, 17, 24])], *tail]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize("seed", range(6))
def test_random_work_on_common_beginnings(serve, seed, chunked):
    """Arrivals, aborts, stops, failures of memory and of logits, in pools that are too small: all come out right."""
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 4, 8])
    options = dict(page_size=page_size, max_batch=draw.randint(2, 5), max_tokens=40, max_seq_len=48)
    served = serve(
        num_pages=draw.randint(48 // page_size, 96 // page_size), permute_seed=seed, chunked_prefill=chunked, **options
    )
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, logprobs=1),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=0, prompt_logprobs=0),
    ]
    served.device.has_memory = lambda inputs: inputs.sizes.B == 1 or draw.random() > 0.05
    served.device.invalid = lambda context: len(context) > 20 and context[-1] % 50 == 0
    work, last, aborted = {}, {}, set()
    for index, prompt in enumerate(beginnings(draw, 30)):
        count = draw.randint(1, 48 - len(prompt))
        work[str(index)] = prompt, replace(draw.choice(kinds), max_tokens=count, seed=draw.randrange(2**40))
    pending = list(work.items())
    while pending or served.engine.has_unfinished():
        while pending and draw.random() < 0.3:
            name, (prompt, params) = pending.pop(0)
            salt = {"cache_salt": "other"} if draw.random() < 0.1 else {}
            served.engine.add_request(name, {"prompt_token_ids": prompt, **salt}, params)
        last.update({output.request_id: output for output in served.step()})
        if served.engine._groups and draw.random() < 0.03:
            name = draw.choice(list(served.engine._groups))
            last[name] = served.engine.abort(name)
            aborted.add(name)
            served.check()
    served.check_empty()
    for name, (prompt, params) in work.items():
        served.check_logprobs(last[name], params)
        got, expected = last[name].outputs[0], served.expected(prompt, params, params.seed)
        assert got.token_ids == expected[: len(got.token_ids)]
        assert got.finish_reason in ("length", "error", "abort" if name in aborted else "length")
        assert got.finish_reason != "length" or got.token_ids == expected
    stats = served.engine.prefix_cache_stats
    assert 0 < stats.hits < stats.queries and served.device.most_shared > 1
