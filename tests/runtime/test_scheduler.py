"""The scheduler against a simulated device that notices wrong positions, pages, rows and parameters."""

import random
from dataclasses import replace

import pytest
import torch

from ingot.ir.errors import InternalError, OptionError, RequestError
from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime.batch import Chunk, RowTables, build_step
from ingot.runtime.pages import PagePool
from ingot.runtime.request import Request, Status
from ingot.runtime.sampling_params import SamplingParams
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.scheduler_config import SchedulerConfig
from ingot.runtime.step import StepBuffer, StepSizes, step_views, step_words


def scheduler_of(num_pages=64, page_size=4, **config):
    config = {"max_batch": 4, "max_tokens": 16, "max_seq_len": 64, "prefix_caching": False, **config}
    return Scheduler(SchedulerConfig(page_size=page_size, **config), PagePool(num_pages, page_size))


def request_of(name, prompt_len, max_tokens=8, **params):
    return Request(name, list(range(1, prompt_len + 1)), SamplingParams(max_tokens=max_tokens, **params), seed=5)


def values(batch):
    return {name: view.tolist() for name, view in batch.inputs.items()}


# The inputs of a step, by hand.


def test_a_prompt_then_decodes_in_flight():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 5, max_tokens=3))
    first = scheduler.schedule()
    got = values(first)
    assert got["tokens"] == [1, 2, 3, 4, 5] and got["token_seqs"] == [0] * 5
    assert (got["q_starts"], got["q_lens"], got["rows"], got["starts"]) == ([0], [5], [0], [0])
    assert (got["logit_rows"], got["sample_index"]) == ([4], [0]) and len(got["page_table"][0]) == 2
    second = scheduler.schedule()  # the first step's token is not known yet
    got = values(second)
    assert (got["tokens"], got["starts"], got["q_lens"], got["logit_rows"]) == ([-1], [-1], [1], [0])
    scheduler.retire(first, [50])
    third = scheduler.schedule()  # the second step's token is in flight: still -1
    assert values(third)["tokens"] == [-1]
    scheduler.retire(second, [51])
    assert scheduler.schedule() is None  # three tokens are known or in flight: no surplus step
    (request,) = scheduler.running
    scheduler.retire(third, [52])
    assert request.output_ids == [50, 51, 52] and request.finish_reason == "length"
    assert scheduler.pool.num_free == 64 and scheduler.num_free_rows == 4


def test_a_known_token_is_fed_with_its_position():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 5))
    scheduler.retire(scheduler.schedule(), [50])  # nothing in flight when the next step is scheduled
    got = values(scheduler.schedule())
    assert (got["tokens"], got["starts"]) == ([50], [5])


def test_decodes_first_then_prompts_within_the_budget():
    scheduler = scheduler_of(max_tokens=6)
    scheduler.add(request_of("a", 3))
    first = scheduler.schedule()
    scheduler.add(request_of("b", 9, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125))
    second = scheduler.schedule()
    got = values(second)
    assert got["tokens"] == [-1, 1, 2, 3, 4, 5] and got["token_seqs"] == [0, 1, 1, 1, 1, 1]
    assert (got["q_starts"], got["q_lens"], got["starts"]) == ([0, 1], [1, 5], [-1, 0])
    assert (got["sample_index"], got["logit_rows"]) == ([0, -1], [0])  # b's prompt goes on: it samples nothing
    scheduler.retire(first, [50])
    got = values(scheduler.schedule())
    assert got["tokens"] == [-1, 6, 7, 8, 9] and got["starts"] == [-1, 5]
    assert (got["sample_index"], got["logit_rows"]) == ([0, 1], [0, 4])
    assert got["temperature"] == [1.0, 0.5] and got["top_k"] == [0, 7] and got["seeds"] == [5, 5]
    assert got["top_p"] == [1.0, 0.25] and got["min_p"] == [0.0, 0.125]


def test_prompts_beside_decodes_are_fed_in_smaller_pieces():
    """Those who decode wait for a step's prompts; where nobody does, a step takes all that it can."""
    scheduler = scheduler_of(max_tokens=16, max_mixed_tokens=5)
    scheduler.add(request_of("a", 12))
    first = scheduler.schedule()
    assert first.inputs["q_lens"].tolist() == [12]
    scheduler.add(request_of("b", 7))
    scheduler.add(request_of("c", 4))
    second = scheduler.schedule()
    assert second.inputs["q_lens"].tolist() == [1, 5]
    scheduler.retire(first, [50])
    assert scheduler.schedule().inputs["q_lens"].tolist() == [1, 2, 3]


def test_a_prompt_that_may_not_be_cut_is_not_held_back():
    scheduler = scheduler_of(max_tokens=16, max_mixed_tokens=5, chunked_prefill=False)
    scheduler.add(request_of("a", 3))
    scheduler.schedule()
    scheduler.add(request_of("b", 9))
    assert scheduler.schedule().inputs["q_lens"].tolist() == [1, 9]


def test_a_step_without_samples_has_one_dummy_logit_row():
    scheduler = scheduler_of(max_tokens=4)
    scheduler.add(request_of("a", 9))
    batch = scheduler.schedule()
    got = values(batch)
    assert (got["logit_rows"], got["sample_index"], got["temperature"]) == ([0], [-1], [0.0])
    assert batch.sampled == () and scheduler.retire(batch, [99]) == []


def test_greedy_switches_the_filters_off():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 2, temperature=0, top_k=5, top_p=0.5, min_p=0.5))
    got = values(scheduler.schedule())
    assert [got[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [[0.0], [0], [1.0], [0.0]]


def test_unused_page_table_entries_are_zero():
    scheduler = scheduler_of(max_tokens=32)
    scheduler.add(request_of("long", 13))
    scheduler.add(request_of("short", 2))
    table = values(scheduler.schedule())["page_table"]
    assert len(table[0]) == len(table[1]) == 4 and table[1][1:] == [0, 0, 0]
    scheduler.abort("long")
    scheduler.add(request_of("other", 2))
    scheduler.schedule()
    assert scheduler._tables.pages[scheduler.requests["other"].row][1:].tolist() == [0] * 15


def test_inputs_are_views_of_one_aligned_buffer_that_is_not_reallocated():
    scheduler = scheduler_of()
    pointers = set()
    scheduler.add(request_of("a", 7, max_tokens=20))
    for _ in range(10):
        batch = scheduler.schedule()
        flat, sizes = batch.inputs.flat, batch.inputs.sizes
        assert flat.dtype == torch.int32 and len(flat) == step_words(sizes)
        assert sum(view.nbytes for view in batch.inputs.values()) == flat.nbytes
        assert batch.inputs["seeds"].data_ptr() % 8 == 0
        pointers.add(flat.data_ptr())
        scheduler.retire(batch, [1])
    assert len(pointers) == 2  # one is filled while the other may still be copied


def test_views_tile_the_buffer():
    sizes = StepSizes(T=7, B=3, L=2, P=5)
    views = step_views(torch.arange(step_words(sizes), dtype=torch.int32), sizes)
    tiles = [view.view(torch.int32).flatten() for view in views.values()]
    assert torch.cat(tiles).tolist() == list(range(step_words(sizes)))
    assert views["page_table"].shape == (3, 5) and views["seeds"].dtype == torch.int64


def test_sequences_without_a_sample_may_stand_anywhere():
    tables, requests = RowTables(max_batch=4, max_pages=3), [request_of(name, 6) for name in "abc"]
    for row, request in enumerate(requests):
        request.seed = 100 + row
        tables.set_request(row, request)
        tables.add_pages(row, [row + 1])
    chunks = [Chunk(request, row, 0, 2 + row, False, row != 1) for row, request in enumerate(requests)]
    got = values(build_step(0, [], chunks, tables, StepBuffer(StepSizes(T=9, B=3, L=3, P=3))))
    assert (got["sample_index"], got["logit_rows"], got["seeds"]) == ([0, -1, 1], [1, 8], [100, 102])
    assert got["page_table"] == [[1], [2], [3]] and got["token_seqs"] == [0, 0, 1, 1, 1, 2, 2, 2, 2]


# What is refused.


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "match"),
    [(0, 8, "empty"), (64, 8, "64 tokens"), (17, 8, "17 tokens"), (16, 30, "12 KV pages"), (16, None, "16 KV pages")],
)
def test_what_can_never_be_served_is_refused(prompt_len, max_tokens, match):
    scheduler = scheduler_of(num_pages=10, chunked_prefill=False)
    with pytest.raises(RequestError, match=match):
        scheduler.add(request_of("a", prompt_len, max_tokens))
    assert not scheduler.has_unfinished


def test_the_limits_themselves_are_served(serve):
    served = serve(num_pages=5, max_tokens=20, chunked_prefill=False, max_seq_len=21)
    served.engine.add_request("a", list(range(16)), SamplingParams(max_tokens=5, temperature=0))  # 20 places: 5 pages
    assert len(served.drain()["a"].outputs[0].token_ids) == 5
    served.engine.add_request("a", list(range(16)), SamplingParams(max_tokens=None, temperature=0))
    assert len(served.drain()["a"].outputs[0].token_ids) == 5
    served.engine.add_request("a", list(range(20)), SamplingParams(max_tokens=1, temperature=0))
    assert len(served.drain()["a"].outputs[0].token_ids) == 1
    served = serve(max_seq_len=21)
    served.engine.add_request("a", list(range(20)), SamplingParams(max_tokens=None, temperature=0))
    assert len(served.drain()["a"].outputs[0].token_ids) == 1


def test_an_id_twice():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 3))
    with pytest.raises(RequestError, match="this id"):
        scheduler.add(request_of("a", 3))


@pytest.mark.parametrize(
    "config", [{"max_batch": 0}, {"max_tokens": 3}, {"max_mixed_tokens": 0}, {"max_seq_len": 0}, {"page_size": 0}]
)
def test_bad_config(config):
    with pytest.raises(OptionError):
        SchedulerConfig(**{"max_batch": 4, "max_tokens": 16, "max_seq_len": 64, **config})


def test_steps_retire_in_order_with_as_many_tokens_as_rows():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(InternalError, match="two steps"):
        scheduler.schedule()
    with pytest.raises(InternalError, match="oldest"):
        scheduler.retire(second, [1])
    with pytest.raises(InternalError, match="2 tokens for 1"):
        scheduler.retire(first, [1, 2])
    scheduler.retire(first, [1])
    with pytest.raises(InternalError):
        scheduler.retire(first, [1])


# Preemption.


def test_the_last_admitted_is_preempted_and_keeps_its_token_in_flight():
    scheduler = scheduler_of(num_pages=4, max_tokens=8)
    scheduler.add(request_of("a", 4))
    scheduler.add(request_of("b", 3))
    first = scheduler.schedule()  # one page each
    second = scheduler.schedule()  # a takes a second page, b's fourth token fits
    scheduler.retire(first, [50, 60])
    third = scheduler.schedule()
    scheduler.retire(second, [51, 61])
    a, b = scheduler.requests["a"], scheduler.requests["b"]
    assert (len(a.pages), len(b.pages), scheduler.pool.num_free) == (2, 2, 0)
    batches, tokens = [third], iter(range(100, 200))
    while b.preemptions == 0:
        batches.append(scheduler.schedule())
        last = scheduler.requests["b"].in_flight
        if b.preemptions == 0:
            scheduler.retire(batches.pop(0), [next(tokens), next(tokens)])
    # a needs a third page. b's pages are still used by the step in flight, so a waits for it too.
    assert last == 1 and b.status is Status.WAITING and b.num_computed == 0 and a.preemptions == 0
    assert scheduler.pool.num_releasing == 2 and batches[-1] is None
    outputs = len(b.output_ids)
    scheduler.retire(batches[0], [next(tokens), next(tokens)])
    assert len(b.output_ids) == outputs + 1 and b.in_flight == 0
    got = values(scheduler.schedule())
    assert got["starts"] == [8] and got["tokens"] == [a.output_ids[-1]] and scheduler.waiting[0] is b


def test_the_scheduler_survives_a_stop_of_a_preempted_request(serve):
    ended_while_waiting = 0
    for stop_at in range(1, 12):
        served = serve(num_pages=5, max_tokens=8)
        prompts = {"a": [1, 2, 3, 4], "b": [5, 6, 7]}
        params = SamplingParams(temperature=0, max_tokens=14)
        expected = {name: served.expected(prompt, params) for name, prompt in prompts.items()}
        stop = SamplingParams(temperature=0, max_tokens=14, stop_token_ids=[expected["b"][stop_at]])
        served.engine.add_request("a", prompts["a"], params)
        served.engine.add_request("b", prompts["b"], stop)
        last = {}
        while served.engine.has_unfinished():
            before = {request: request.preemptions for request in served.scheduler.running}
            last |= {output.request_id: output for output in served.step()}
            ended_while_waiting += any(request.finished and request.preemptions > n for request, n in before.items())
        served.check_empty()
        assert last["a"].outputs[0].token_ids == expected["a"]
        assert last["b"].outputs[0].token_ids == expected["b"][: expected["b"].index(expected["b"][stop_at]) + 1]
    assert ended_while_waiting


def workload(rng, vocab, max_seq_len, count, longest_prompt):
    work = []
    for _ in range(count):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, longest_prompt))]
        greedy = rng.random() < 0.3
        params = SamplingParams(
            temperature=0 if greedy else rng.choice([0.5, 1.0]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.5]),
            min_p=rng.choice([0.0, 0.25]),
            seed=rng.randrange(2**40),
            max_tokens=rng.randint(1, max_seq_len - len(prompt)),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            logprobs=rng.choice([None, None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, 0, 2]),
        )
        work.append((prompt, params))
    return work


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize("seed", range(25))
def test_random_work_in_small_pools(serve, seed, chunked):
    """Random arrivals, aborts and stops; pages permuted and poisoned; tokens equal those of each request alone."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    max_seq_len = rng.randint(10, 40)
    max_batch = rng.randint(1, 6)
    max_tokens = max(max_batch, rng.randint(1, 24))
    least = -(-max_seq_len // page_size)
    served = serve(
        num_pages=rng.randint(least, least * 2 + 2),
        page_size=page_size,
        max_batch=max_batch,
        max_tokens=max_tokens,
        max_seq_len=max_seq_len,
        chunked_prefill=chunked,
        permute_seed=seed,
    )
    longest = max_seq_len - 1 if chunked else min(max_tokens, max_seq_len - 1)
    work = workload(rng, served.vocab, max_seq_len, 25, longest)
    last, aborted, stopped, partial = {}, set(), {}, {}
    pending = list(enumerate(work))
    while pending or served.engine.has_unfinished():
        while pending and rng.random() < 0.4:
            index, (prompt, params) = pending.pop(0)
            name = str(index)
            expected = served.expected(prompt, params, params.seed)
            if rng.random() < 0.3:
                at = rng.randrange(len(expected))
                at = expected.index(expected[at])
                stopped[name] = expected[: at + 1]
                params = replace(params, stop_token_ids=(expected[at],))
            served.engine.add_request(name, prompt, params)
        for output in served.step():
            last[output.request_id] = output
            ids = output.outputs[0].token_ids
            assert ids[: len(partial.get(output.request_id, []))] == partial.get(output.request_id, [])
            partial[output.request_id] = ids
        alive = [group for group in served.engine._groups if group not in aborted]
        if alive and rng.random() < 0.03:
            name = rng.choice(alive)
            last[name] = served.engine.abort(name)
            aborted.add(name)
            served.check()
    served.check_empty()
    assert set(last) == {str(index) for index in range(len(work))}
    for index, (prompt, params) in enumerate(work):
        served.check_logprobs(last[str(index)], params)
        output = last[str(index)].outputs[0]
        expected = served.expected(prompt, params, params.seed)
        if str(index) in aborted:
            assert output.finish_reason == "abort" and output.token_ids == expected[: len(output.token_ids)]
        elif str(index) in stopped:
            assert output.finish_reason == "stop" and output.token_ids == stopped[str(index)]
        else:
            assert output.finish_reason == "length" and output.token_ids == expected
    assert served.device.num_on_device > 0


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_a_small_pool_preempts_and_gives_the_tokens_of_an_ample_one(serve, chunked):
    rng = random.Random(3)
    work = workload(rng, 997, 48, 12, 16)
    results = []
    for num_pages in (13, 200):
        served = serve(num_pages=num_pages, max_batch=6, max_seq_len=48, chunked_prefill=chunked)
        for index, (prompt, params) in enumerate(work):
            served.engine.add_request(str(index), prompt, params)
        requests = list(served.scheduler.requests.values())
        last = served.drain()
        results.append([last[str(index)].outputs[0].token_ids for index in range(len(work))])
        preemptions = sum(request.preemptions for request in requests)
        assert (preemptions > 5) == (num_pages == 13)
    assert results[0] == results[1]


def test_lengths_need_no_surplus_step(serve):
    served = serve(max_batch=3)
    for index, count in enumerate((1, 5, 9, 2)):
        served.engine.add_request(str(index), [1, 2, 3], SamplingParams(max_tokens=count))
    served.drain()
    assert served.device.num_sampled == 1 + 5 + 9 + 2


def test_a_stop_costs_one_surplus_token(serve):
    served = serve()
    params = SamplingParams(temperature=0, max_tokens=10)
    token = served.expected([1, 2, 3], params)[4]
    served.engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[token]))
    assert len(served.drain()["a"].outputs[0].token_ids) == 5 and served.device.num_sampled == 6


def test_pages_of_an_ended_request_wait_for_the_step_in_flight():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 5, stop_token_ids=[50]))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.retire(first, [50])
    assert scheduler.requests == {} and scheduler.pool.num_free == 62  # `second` still writes there
    assert scheduler.retire(second, [51]) == [] and scheduler.pool.num_free == 64


def test_pages_of_an_aborted_request_wait_for_every_step_in_flight():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 5))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.abort("a") and not scheduler.abort("a")
    scheduler.retire(first, [50])
    assert scheduler.pool.num_free == 62
    scheduler.retire(second, [51])
    assert scheduler.pool.num_free == 64


def test_a_prompt_is_admitted_when_its_first_decode_fits_too():
    scheduler = scheduler_of(num_pages=3)
    scheduler.add(request_of("a", 6, max_tokens=2))
    scheduler.add(request_of("b", 4, max_tokens=2))  # fills its page; the next token needs another
    scheduler.schedule()
    assert [request.request_id for request in scheduler.running] == ["a"] and scheduler.pool.num_free == 1


def test_whole_prompts_wait_for_the_budget():
    scheduler = scheduler_of(max_tokens=8, chunked_prefill=False)
    scheduler.add(request_of("a", 5))
    scheduler.add(request_of("b", 8))
    scheduler.add(request_of("c", 1))
    lengths = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        lengths.append(batch.inputs["q_lens"].tolist())
        scheduler.retire(batch, [1] * batch.inputs.sizes.L)
    assert lengths[0] == [5] and [8] in lengths and lengths.index([8]) == 8  # b waits for a; c does not overtake b


def test_old_requests_finish_while_new_ones_keep_coming(serve):
    served = serve(num_pages=8, max_batch=4, max_seq_len=32)
    served.engine.add_request("old", [1] * 10, SamplingParams(max_tokens=22, temperature=0))
    for index in range(60):
        served.engine.add_request(str(index), [2] * 4, SamplingParams(max_tokens=12, temperature=0))
        if any(output.request_id == "old" and output.finished for output in served.step()):
            break
    assert index < 40
    served.drain()


def test_reset_frees_everything():
    scheduler = scheduler_of(num_pages=6)
    for name in "abc":
        scheduler.add(request_of(name, 7))
    scheduler.schedule()
    scheduler.schedule()
    scheduler.reset()
    assert scheduler.pool.num_free == 6 and scheduler.num_free_rows == 4 and not scheduler.has_unfinished
    scheduler.add(request_of("a", 7))
    assert values(scheduler.schedule())["tokens"] == [1, 2, 3, 4, 5, 6, 7]


# Rows of logits that rate prompts.


def test_rows_that_rate_prompts_stand_behind_the_sampled_ones():
    scheduler = scheduler_of(max_tokens=8)
    scheduler.add(request_of("a", 3, logprobs=2, repetition_penalty=1.5))
    scheduler.add(request_of("b", 4, prompt_logprobs=1))
    for request in scheduler.requests.values():
        request.scores_prompt = request.params.prompt_logprobs is not None
    batch = scheduler.schedule()
    got = values(batch)
    assert got["logit_rows"] == [2, 6, 3, 4, 5] and got["sample_index"] == [0, 1]
    assert got["targets"] == [-1, -1, 2, 3, 4] and got["num_logprobs"] == [2, -1, 1, 1, 1]
    assert got["count_rows"] == [0, -1, -1, -1, -1] and got["prompt_ends"] == [3, -1]
    assert got["repetition"] == [1.5, 1, 1, 1, 1] and got["temperature"] == [1, 1, 0, 0, 0]
    assert [(request.request_id, count) for request, count in batch.scored] == [("b", 3)] and batch.gives_logprobs
    assert [row for _, _, row in scheduler.retire(batch, [7, 8, 9, 9, 9])] == [0, 1]


def test_a_step_rates_so_many_rows_and_no_more(serve):
    served = serve(num_pages=400, max_tokens=700, max_seq_len=700, max_batch=4)
    asks = SamplingParams(max_tokens=2, seed=0, prompt_logprobs=0)
    work = {"a": (600, asks), "b": (100, asks), "c": (90, SamplingParams(max_tokens=2, seed=0)), "d": (2, asks)}
    for name, (length, params) in work.items():
        served.engine.add_request(name, [index % 97 for index in range(length)], params)
    last = served.drain()
    for name, (_, params) in work.items():
        served.check_logprobs(last[name], params)
    assert served.device.most_rated == MAX_SCORED and served.device.num_rated == 599 + 99 + 1
    assert served.device.num_launches == 3 + 1  # 256, 256, 87 + 99 + 1 rows, then the last tokens


def test_whole_prompts_wait_for_rows_that_rate_them(serve):
    served = serve(num_pages=400, max_tokens=700, max_seq_len=700, chunked_prefill=False)
    params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=1)
    for name in "abc":
        served.engine.add_request(name, list(range(200)), params)
    with pytest.raises(RequestError, match="258 tokens, and their log-probabilities"):
        served.engine.add_request("d", list(range(258)), params)
    served.engine.add_request("e", list(range(258)), SamplingParams(max_tokens=1, seed=0))
    last = served.drain()
    assert all(len(last[name].prompt_logprobs) == 200 for name in "abc") and served.device.most_rated == 199
