"""Steps that feed drafts: the tokens are those of plain steps, in fewer steps; pages, lengths and room bound drafts."""

from dataclasses import replace

import pytest
from served import GREEDY
from small_scheduler import request_of, scheduler_of, values

from ingot.runtime.params.sampling_params import SamplingParams

PROMPTS = {"a": list(range(10)), "b": list(range(20, 33)), "c": [7]}
LONG = replace(GREEDY, max_tokens=24)


def test_drafts_that_are_right_save_steps_and_wrong_ones_cost_none(serve):
    launches = {}
    for drafts in (0, 1, 4):
        served = serve(drafts=drafts, max_tokens=32)
        for name, prompt in PROMPTS.items():
            served.engine.add_request(name, prompt, replace(LONG, logprobs=2))
        last = served.drain()
        for name, prompt in PROMPTS.items():
            assert last[name].outputs[0].token_ids == served.expected(prompt, LONG)
            served.check_logprobs(last[name], replace(LONG, logprobs=2))
        launches[drafts] = served.device.num_launches
        assert (served.device.num_drafted > 0) == (drafts > 0)
        assert drafts == 0 or 0 < served.device.num_kept < served.device.num_drafted
    assert launches[0] >= 24 and launches[4] < launches[1] < launches[0]


def test_a_sequence_ends_among_the_tokens_of_one_step(serve):
    """The tokens behind its end are dropped, and so are their pages."""
    for count in range(1, 9):
        served = serve(drafts=4, max_tokens=32)
        stop = served.expected(PROMPTS["a"], LONG)[:count]
        params = replace(LONG, stop_token_ids=(stop[-1],))
        served.engine.add_request("a", PROMPTS["a"], params)
        got = served.drain()["a"].outputs[0]
        first = stop.index(stop[-1]) + 1
        assert (got.finish_reason, got.stop_reason, got.token_ids) == ("stop", stop[-1], stop[:first])


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_no_more_drafts_than_a_length_has_room_for(serve, max_tokens):
    served = serve(drafts=4, max_tokens=32, max_seq_len=16)
    params = replace(GREEDY, max_tokens=max_tokens)
    served.engine.add_request("a", PROMPTS["a"], params)
    got = served.drain()["a"].outputs[0]
    assert got.finish_reason == "length" and got.token_ids == served.expected(PROMPTS["a"], params)


def test_drafts_preempt_none_and_a_preempted_sequence_goes_on(serve):
    served = serve(num_pages=12, drafts=4, max_tokens=32)
    prompts = {name: list(range(30 * place, 30 * place + 9)) for place, name in enumerate("abc")}
    for name, prompt in prompts.items():
        served.engine.add_request(name, prompt, LONG)
    requests = list(served.scheduler.requests.values())
    last = served.drain()
    for name, prompt in prompts.items():
        assert last[name].outputs[0].token_ids == served.expected(prompt, LONG)
    assert served.scheduler.num_preemptions and not requests[0].preemptions and served.device.num_kept
    ample = serve(num_pages=3 * 9 + 3, drafts=4, max_tokens=32)  # each at full length, and what drafts leave to others
    for name, prompt in prompts.items():
        ample.engine.add_request(name, prompt, LONG)
    ample.drain()
    assert not ample.scheduler.num_preemptions


@pytest.mark.parametrize(
    "withheld",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"min_tokens": 24},
        {"allowed_token_ids": [300, 600, 900], "bad_words": ["300 600", "600 300 900"]},
    ],
)
def test_what_depends_on_the_number_of_tokens_feeds_no_drafts(serve, withheld):
    served = serve(drafts=4, max_tokens=32, eos=[3] if "min_tokens" in withheld else [], words=True)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, **withheld)
    served.engine.add_request("a", PROMPTS["a"], params)
    served.engine.add_request("b", PROMPTS["b"], LONG)
    first, _ = served.scheduler.requests.values()
    beside = False
    while served.engine.has_unfinished():
        served.step()
        for batch in served.scheduler._in_flight:
            assert all(chunk.rows < 2 or chunk.request is not first for chunk in batch.chunks)
            beside = beside or (first in batch.requests and batch.rows is not None)
    assert first.output_ids == served.expected(PROMPTS["a"], params, 5) and beside, "others of the step do"


def test_drafts_come_once_min_tokens_are_there(serve):
    served = serve(drafts=4, max_tokens=32, page_size=2, eos=[3])
    params = replace(LONG, min_tokens=6)
    served.engine.add_request("a", PROMPTS["a"], params)
    (request,) = served.scheduler.requests.values()
    known = []
    while served.engine.has_unfinished():
        served.step()
        known += [len(request.output_ids) for batch in served.scheduler._in_flight if batch.rows]
    assert known and min(known) >= 6 and request.output_ids == served.expected(PROMPTS["a"], params)


def test_the_inputs_of_a_step_with_drafts():
    """A sequence feeds its last token and drafts, all from the device, and gets a row of logits behind each."""
    scheduler = scheduler_of(max_drafts=2, max_tokens=32)
    scheduler.add(request_of("a", 3, max_tokens=20, temperature=0.7))
    scheduler.add(request_of("b", 5, max_tokens=20, repetition_penalty=1.3))
    first = scheduler.schedule()
    second = scheduler.schedule()
    got = values(second)
    assert got["tokens"] == [-1, -1, -2, -3], "first those that feed one token"
    assert got["starts"] == [-1, -1] and got["q_lens"] == [1, 3] and got["logit_rows"] == [0, 1, 2, 3]
    assert got["sample_index"] == [0, 3] and second.rows == (1, 3)
    a, b = scheduler.requests.values()
    assert got["count_rows"] == [b.row, -1, -1, -1] and got["repetition"][1:] == [1, 1, 1]
    assert [round(one, 3) for one in got["temperature"]] == [1, 0.7, 0.7, 0.7]
    scheduler.retire(first, [11, 12])
    third = scheduler.schedule()
    assert [token for _, token, _ in scheduler.retire(second, [21, 31, 32, 33], [0, 2])] == [21, 31]
    assert a.output_ids == [11, 31] and b.output_ids == [12, 21]
    # Of the step in flight it is not known how many are kept: its three and the known ones are the most.
    assert values(third)["tokens"] == [-1, -1, -2, -3] and (a.num_tokens, a.num_computed) == (3 + 2 + 3, 3 + 1 + 3)
    scheduler.retire(third, [22, 41, 42, 43], [0, 0])
    assert a.output_ids == [11, 31, 41, 42, 43] and a.num_computed == a.num_tokens - 1 == 7


def test_as_many_tokens_as_a_step_has_room_for(serve):
    served = serve(drafts=4, max_batch=4, max_tokens=6)
    for name, prompt in PROMPTS.items():
        served.engine.add_request(name, prompt, LONG)
    last = served.drain()
    assert served.device.most_tokens == 6 and served.device.num_drafted
    for name, prompt in PROMPTS.items():
        assert last[name].outputs[0].token_ids == served.expected(prompt, LONG)


def test_a_step_with_drafts_that_has_no_memory_is_made_smaller(serve):
    served = serve(drafts=4, max_tokens=32)
    served.device.has_memory = lambda inputs: inputs.sizes.T < 9 or inputs.sizes.B < 3
    for name, prompt in PROMPTS.items():
        served.engine.add_request(name, prompt[:2], LONG)
    last = served.drain()
    assert served.scheduler.num_preemptions
    for name, prompt in PROMPTS.items():
        assert last[name].outputs[0].token_ids == served.expected(prompt[:2], LONG)


@pytest.mark.parametrize(("num_pages", "fed"), [(4, [1, 1]), (5, [3, 1]), (6, [3, 3])])
def test_drafts_leave_a_page_to_each_that_runs(num_pages, fed):
    """The last token of both fills their first pages: drafts need another one."""
    scheduler = scheduler_of(num_pages=num_pages, max_drafts=2, max_tokens=32)
    for name in "ab":
        scheduler.add(request_of(name, 3, max_tokens=12))
    scheduler.schedule()
    assert values(scheduler.schedule())["q_lens"] == fed
