"""Rows of logits that compute prompt_logprobs: their order, and how many a step has."""

import pytest
from small_scheduler import request_of, scheduler_of, values

from ingot.ir.errors import RequestError
from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime.params.sampling_params import SamplingParams


def test_rows_that_score_prompts_follow_the_sampled_ones():
    scheduler = scheduler_of(max_tokens=8)
    scheduler.add(request_of("a", 3, logprobs=2, repetition_penalty=1.5))
    scheduler.add(request_of("b", 4, prompt_logprobs=1))
    batch = scheduler.schedule()
    got = values(batch)
    assert got["logit_rows"] == [2, 6, 3, 4, 5] and got["sample_index"] == [0, 1]
    assert got["targets"] == [-1, -1, 2, 3, 4] and got["num_logprobs"] == [2, -1, 1, 1, 1]
    assert got["count_rows"] == [0, -1, -1, -1, -1] and got["prompt_ends"] == [3, -1]
    assert got["repetition"] == [1.5, 1, 1, 1, 1] and got["temperature"] == [1, 1, 0, 0, 0]
    assert [(request.request_id, count) for request, count in batch.scored] == [("b", 3)] and batch.returns_logprobs
    assert [row for _, _, row in scheduler.retire(batch, [7, 8, 9, 9, 9])] == [0, 1]


def test_positions_of_a_withdrawn_step_are_scored_again():
    scheduler = scheduler_of(max_tokens=8)
    scheduler.add(request_of("a", 3))
    scheduler.add(request_of("b", 4, prompt_logprobs=1))
    first = scheduler.schedule()
    assert [count for _, count in first.scored] == [3] and scheduler.withdraw(first) is None
    scheduler.abort("a")
    again = scheduler.schedule()
    assert [(request.request_id, count) for request, count in again.scored] == [("b", 3)]


def test_a_step_scores_so_many_rows_and_no_more(serve):
    served = serve(num_pages=400, max_tokens=700, max_seq_len=700, max_batch=4)
    asks = SamplingParams(max_tokens=2, seed=0, prompt_logprobs=0)
    work = {"a": (600, asks), "b": (100, asks), "c": (90, SamplingParams(max_tokens=2, seed=0)), "d": (2, asks)}
    for name, (length, params) in work.items():
        served.engine.add_request(name, [index % 97 for index in range(length)], params)
    last = served.drain()
    for name, (_, params) in work.items():
        served.check_logprobs(last[name], params)
    assert served.device.most_scored == MAX_SCORED and served.device.num_scored == 599 + 99 + 1
    assert served.device.num_launches == 3 + 1  # 256, 256, 87 + 99 + 1 rows, then the last tokens


def test_whole_prompts_wait_for_rows_that_score_them(serve):
    served = serve(num_pages=400, max_tokens=700, max_seq_len=700, chunked_prefill=False)
    params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=1)
    for name in "abc":
        served.engine.add_request(name, list(range(200)), params)
    with pytest.raises(RequestError, match="258 tokens of the prompt are fed in one step"):
        served.engine.add_request("d", list(range(258)), params)
    served.engine.add_request("e", list(range(258)), SamplingParams(max_tokens=1, seed=0))
    last = served.drain()
    assert all(len(last[name].prompt_logprobs) == 200 for name in "abc") and served.device.most_scored == 199
