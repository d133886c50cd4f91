"""What the scheduler refuses, whom a step takes, and when rows and pages come back."""

import pytest
from small_scheduler import request_of, scheduler_of, values

from ingot.ir.errors import InternalError, OptionError, RequestError
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig

# Whom a step takes.


def test_prompts_beside_decodes_are_fed_in_smaller_pieces():
    """A step with decodes takes few tokens of prompts, because streams wait for it. Other steps take all they can."""
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


def test_prompts_are_not_held_back_for_sequences_that_are_not_streamed():
    scheduler = scheduler_of(max_tokens=16, max_mixed_tokens=5)
    for name in ("a", "b"):
        scheduler.add(request_of(name, 3, streamed=False))
    first = scheduler.schedule()
    scheduler.add(request_of("c", 20, streamed=False))
    assert scheduler.schedule().inputs["q_lens"].tolist() == [1, 1, 14]
    scheduler.retire(first, [50, 50])
    scheduler.add(request_of("d", 20))
    assert scheduler.schedule().inputs["q_lens"].tolist() == [1, 1, 6, 8], (
        "one that is streamed and does not decode yet"
    )


def test_a_prompt_that_may_not_be_cut_is_not_held_back():
    scheduler = scheduler_of(max_tokens=16, max_mixed_tokens=5, chunked_prefill=False)
    scheduler.add(request_of("a", 3))
    scheduler.schedule()
    scheduler.add(request_of("b", 9))
    assert scheduler.schedule().inputs["q_lens"].tolist() == [1, 9]


def test_a_prompt_is_admitted_when_its_first_decode_fits_too():
    scheduler = scheduler_of(num_pages=3)
    scheduler.add(request_of("a", 6, max_tokens=2))
    scheduler.add(request_of("b", 4, max_tokens=2))  # fills its page; the next token needs another
    scheduler.schedule()
    assert [request.request_id for request in scheduler.running] == ["a"] and scheduler.pages.pools[0].num_free == 1


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
    with pytest.raises(InternalError, match="2 steps are in flight"):
        scheduler.schedule()
    with pytest.raises(InternalError, match="oldest"):
        scheduler.retire(second, [1])
    with pytest.raises(InternalError, match="2 tokens for 1"):
        scheduler.retire(first, [1, 2])
    scheduler.retire(first, [1])
    with pytest.raises(InternalError):
        scheduler.retire(first, [1])


# How many steps a request takes, and when its pages come back.


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
    assert scheduler.requests == {} and scheduler.pages.pools[0].num_free == 62  # `second` still writes there
    assert scheduler.retire(second, [51]) == [] and scheduler.pages.pools[0].num_free == 64


def test_pages_of_an_aborted_request_wait_for_every_step_in_flight():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 5))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.abort("a") and not scheduler.abort("a")
    scheduler.retire(first, [50])
    assert scheduler.pages.pools[0].num_free == 62
    scheduler.retire(second, [51])
    assert scheduler.pages.pools[0].num_free == 64


def test_reset_frees_everything():
    scheduler = scheduler_of(num_pages=6)
    for name in "abc":
        scheduler.add(request_of(name, 7))
    scheduler.schedule()
    scheduler.schedule()
    scheduler.reset()
    assert scheduler.pages.pools[0].num_free == 6 and scheduler.rows.num_free == 4 and not scheduler.has_unfinished
    scheduler.add(request_of("a", 7))
    assert values(scheduler.schedule())["tokens"] == [1, 2, 3, 4, 5, 6, 7]
