"""States that stand once per sequence lie in slots, and the prefix cache keeps some: what is found, and that nothing
else changes. The fake device keeps all tokens of a sequence in its slot, so a wrong or stale slot shows."""

import random
from dataclasses import replace

import pytest
from drawn import drawn

from ingot.ir.errors import ArtifactError
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.prefix_cache import PrefixCacheStats
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.blocks import Blocks
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig
from ingot.serve.set_up import check_slots

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = list(range(100, 114))  # three pages of 4, and two tokens


def ask(served, prompt, params=GREEDY, name="r", **given):
    """Serve one request alone, check its tokens, and give how many of its prompt's were found."""
    served.engine.add_request(name, {"prompt_token_ids": prompt, **given}, params)
    output = served.drain()[name]
    assert output.outputs[0].token_ids == served.expected(prompt, params, params.seed or 0)
    return output.num_cached_tokens


def test_the_last_full_page_of_a_prompt_is_found(serve):
    served = serve(slots=12)
    assert ask(served, PROMPT) == 0 and served.device.num_fed == 14 + 5
    assert ask(served, PROMPT) == 12 and served.device.num_fed == 19 + 2 + 5
    assert ask(served, [*PROMPT, 1, 2, 3]) == 12
    assert ask(served, PROMPT[1:]) == 0 and ask(served, PROMPT, cache_salt="other") == 0
    assert served.engine.prefix_cache_stats == PrefixCacheStats(queries=14 + 14 + 17 + 13 + 14, hits=12 + 12)


def test_a_second_turn_finds_the_first_one(serve):
    served = serve(slots=12)
    ask(served, PROMPT)
    said = served.expected(PROMPT, GREEDY)
    # 14 + 6 tokens, of which the last was never fed.
    turn = [*PROMPT, *said, 1, 2, 3]
    assert ask(served, turn) == 16
    assert ask(served, [*turn, *served.expected(turn, GREEDY), 4]) == 28


def test_the_third_request_finds_what_two_share(serve):
    """The second one finds pages and no slot after what it shares with the first, and leaves one there."""
    served = serve(slots=12)
    system = list(range(300, 309))
    asked = [[*system, *range(begin, begin + 5)] for begin in (1, 20, 40, 60)]
    assert [ask(served, prompt) for prompt in asked] == [0, 0, 8, 8]


def test_many_requests_wait_for_the_state_after_what_they_share(serve):
    """Pages of a first request are there: of the others one computes again what they share, and leaves its state."""
    served = serve(slots=12, num_pages=200, max_tokens=64, max_seq_len=96)
    system = list(range(300, 348))
    ask(served, [*system, 1, 2])
    for number in range(4):
        served.engine.add_request(str(number), [*system, 10 + number, 20], GREEDY)
    fed = served.device.num_fed
    last = served.drain()
    assert [last[str(number)].num_cached_tokens for number in range(4)] == [48] * 4
    assert served.device.num_fed - fed == 4 * (2 + 5)
    prompts = [[*system[:40], 50 + number, *range(9)] for number in range(4)]
    for number, prompt in enumerate(prompts):
        served.engine.add_request(str(number), prompt, GREEDY)
    last = served.drain()
    assert [last[str(number)].num_cached_tokens for number in range(4)] == [0, 40, 40, 40]
    for number, prompt in enumerate(prompts):
        assert last[str(number)].outputs[0].token_ids == served.expected(prompt, GREEDY)


def test_a_prompt_in_pieces_is_found_piece_by_piece(serve):
    served = serve(slots=12, max_tokens=8)
    prompt = list(range(200, 230))
    assert ask(served, prompt) == 0
    assert ask(served, [*prompt[:17], 1, 2, 3]) == 16, "steps of 8 tokens end there"
    assert ask(served, prompt) == 28


def test_of_generated_tokens_one_page_is_kept(serve):
    """The end of each page takes the place of the one before it: a long answer does not drive out what others kept."""
    served = serve(slots=8, num_pages=64)
    params = replace(GREEDY, max_tokens=40)
    ask(served, PROMPT, params)
    assert served.slots.num_kept == 2
    said = served.expected(PROMPT, params)
    assert ask(served, [*PROMPT, *said]) == 52
    # Without the last page that was generated there is the prompt's.
    assert ask(served, [*PROMPT, *said[:20], 1]) == 12 and ask(served, PROMPT) == 12


def test_a_kept_state_goes_before_a_running_sequence_waits(serve):
    served = serve(slots=4, max_batch=4, num_pages=64)
    prompts = [[*range(begin, begin + 13)] for begin in range(0, 320, 40)]
    for index, prompt in enumerate(prompts):
        served.engine.add_request(str(index), prompt, GREEDY)
    last = served.drain()
    for index, prompt in enumerate(prompts):
        assert last[str(index)].outputs[0].token_ids == served.expected(prompt, GREEDY)
    assert served.device.most_sequences == 4


def test_the_only_slot_is_taken_over(serve):
    """A request goes on in the slot that it finds, where there is no other."""
    served = serve(slots=1, max_batch=1, max_tokens=16)
    params = replace(GREEDY, max_tokens=3)
    assert ask(served, PROMPT, params) == 0 and served.slots.num_kept == 1, "of 17 tokens the last was not fed"
    assert ask(served, [*PROMPT, *served.expected(PROMPT, params)], params) == 16 and served.slots.num_kept == 0


def test_several_sequences_of_a_prompt_begin_with_one_slot(serve):
    served = serve(slots=12)
    params = SamplingParams(temperature=1.0, max_tokens=9, n=3, seed=5)
    served.engine.add_request("r", PROMPT, params)
    output = served.drain()["r"]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert served.device.most_slots_read >= 2 and served.device.num_fed == 14 + 2 + 2 + 3 * 8


def test_off(serve):
    served = serve(slots=12, prefix_caching=False)
    for _ in range(2):
        assert ask(served, PROMPT) == 0
    assert served.slots.num_kept == 0


def test_without_pieces_what_is_generated_is_found(serve):
    served = serve(slots=12, chunked_prefill=False)
    assert ask(served, PROMPT) == 0 and ask(served, PROMPT) == 0
    assert ask(served, [*PROMPT, *served.expected(PROMPT, GREEDY)][:15]) == 0
    assert ask(served, [*PROMPT[:12], *range(3)][:12]) == 0 and ask(served, [*PROMPT[:12], *range(3)]) == 12


@pytest.mark.parametrize(
    ("options", "what"), [({"max_drafts": 3}, "feeds drafts"), ({"blocks": Blocks(4, 4)}, "denoises blocks")]
)
def test_a_state_takes_no_tokens_back(options, what):
    config = SchedulerConfig(max_batch=2, max_tokens=16, max_seq_len=32, **options)
    check_slots(config, None)
    with pytest.raises(ArtifactError, match=f"the entry 'main' {what}, and has a state that is kept once per sequence"):
        check_slots(config, PagePool(6))


def test_the_cache_can_be_emptied(serve):
    served = serve(slots=12)
    ask(served, PROMPT)
    assert served.engine.reset_prefix_cache() and served.slots.num_kept == 0
    assert ask(served, PROMPT) == 0


def test_a_failed_step_leaves_nothing_behind(serve):
    served = serve(slots=12)
    served.device.fail_at = 3
    served.engine.add_request("r", PROMPT, GREEDY)
    with pytest.raises(RuntimeError):
        served.drain()
    served.device.launched.clear()
    served.check_empty()
    assert served.slots.num_kept == 0 and ask(served, PROMPT) == 0 and ask(served, PROMPT) == 12


def test_a_state_that_may_not_be_finite_is_forgotten(serve):
    served = serve(slots=12)
    served.device.invalid = lambda context: len(context) > 15
    served.engine.add_request("r", PROMPT, GREEDY)
    assert served.drain()["r"].outputs[0].finish_reason == "error"
    assert served.slots.num_kept == 0


def test_a_step_without_memory_leaves_no_state_of_its_own(serve):
    """It may have run in part: its sequences begin again, from what was kept before."""
    served = serve(slots=12)
    for name, begin in (("a", 0), ("b", 300)):
        served.engine.add_request(name, list(range(begin, begin + 9)), replace(GREEDY, max_tokens=20))
    for _ in range(10):
        served.step()
    served.device.has_memory = lambda inputs: inputs.sizes.B == 1
    last = served.drain()
    for name, begin in (("a", 0), ("b", 300)):
        expected = served.expected(list(range(begin, begin + 9)), replace(GREEDY, max_tokens=20))
        assert last[name].outputs[0].token_ids == expected
    stats = served.engine.prefix_cache_stats
    assert served.scheduler.num_preemptions >= 2 and stats.recomputed < 2 * 4, "each from its last full page"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize("seed", drawn(4, range(40)))
def test_random_conversations(serve, seed, chunked):
    """Shared beginnings, turns, aborts, preemption, steps that have no memory: tokens are those of each alone."""
    rng = random.Random(seed)
    page_size, max_seq_len, max_batch = rng.choice([1, 2, 4, 8]), rng.randint(20, 60), rng.randint(1, 5)
    max_tokens, least = max(max_batch, rng.randint(4, 24)), -(-max_seq_len // page_size)
    served = serve(
        num_pages=rng.randint(least, least * 3),
        page_size=page_size,
        max_batch=max_batch,
        max_tokens=max_tokens,
        max_seq_len=max_seq_len,
        chunked_prefill=chunked,
        permute_seed=seed,
        slots=max_batch + rng.choice([0, 1, max_batch, 3 * max_batch]),
        lifetimes={"window_5": rng.randint(least, least * 2) + 1} if rng.random() < 0.3 else None,
    )
    if rng.random() < 0.4:
        served.device.has_memory = lambda inputs: inputs.sizes.B == 1 or rng.random() > 0.05
    longest = max_seq_len - 2 if chunked else min(max_tokens, max_seq_len - 2)
    systems = [[rng.randrange(served.vocab) for _ in range(rng.randint(1, longest))] for _ in range(3)]
    said: list[list[int]] = []
    asked, last, aborted = {}, {}, set()
    while len(asked) < 40 or served.engine.has_unfinished():
        while len(asked) < 40 and rng.random() < 0.3:
            name, begin = str(len(asked)), rng.choice([*systems, *said[-4:]])
            prompt = [
                *begin[: rng.randint(1, longest)],
                *(rng.randrange(served.vocab) for _ in range(rng.randint(0, 4))),
            ]
            prompt = prompt[:longest]
            params = SamplingParams(
                temperature=rng.choice([0, 1.0]),
                seed=rng.randrange(9),
                max_tokens=rng.randint(1, max_seq_len - len(prompt)),
                repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
                prompt_logprobs=rng.choice([None, None, None, 1]),
            )
            asked[name] = prompt, params
            served.engine.add_request(name, prompt, params)
        for output in served.step():
            last[output.request_id] = output
            if output.finished:
                said.append([*output.prompt_token_ids, *output.outputs[0].token_ids])
        alive = [group for group in served.engine._groups if group not in aborted]
        if alive and rng.random() < 0.03:
            name = rng.choice(alive)
            last[name] = served.engine.abort(name)
            aborted.add(name)
            served.check()
    served.check_empty()
    for name, (prompt, params) in asked.items():
        output, expected = last[name].outputs[0], served.expected(prompt, params, params.seed)
        assert output.token_ids == (expected[: len(output.token_ids)] if name in aborted else expected)
        served.check_logprobs(last[name], params)
    for pool in (*served.scheduler.pages.pools, served.slots):
        assert pool.num_releasing == 0
