"""Pipeline stages: a step in flight for each and one more, of sequences in turns, and equally many in each."""

import pytest
from served import GREEDY

from ingot.ir.errors import InternalError, OptionError
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig

LONG = SamplingParams(temperature=0, max_tokens=30)


def in_flight(served) -> list[list[str]]:
    """The caller's ids of the sequences in each step in flight, oldest first."""
    return [[one.request_id.split("[")[0] for one in batch.requests] for batch in served.scheduler._in_flight]


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_compute_steps_of_different_sequences(serve, stages):
    served = serve(stages=stages, max_batch=8, max_tokens=64, num_pages=200, page_size=4)
    for index in range(7):
        served.engine.add_request(f"{index}", [index + 1, 5], LONG)
    for _ in range(stages):
        assert served.step() == [], "stages are free"
    for _ in range(20):
        assert served.step()
        steps = in_flight(served)
        assert len(steps) == stages
        fed = [one for step in steps for one in step]
        assert len(set(fed)) == len(fed), "the steps of the stages have different sequences"
        assert all(len(step) <= -(-7 // stages) for step in steps)
    assert served.device.num_on_device > 0, "tokens are fed before the host has read them"
    last = served.drain()
    for index in range(7):
        assert last[f"{index}"].outputs[0].token_ids == served.expected([index + 1, 5], LONG)


def test_groups_are_equal_again_after_sequences_end(serve):
    """Six of eight sequences end, five of them in one group: the others do not stay together."""
    served = serve(stages=2, max_batch=8, max_tokens=64, num_pages=200, page_size=4)
    for index in range(8):
        most = 4 if index < 3 or index == 7 else 40
        served.engine.add_request(f"{index}", [index + 1], SamplingParams(temperature=0, max_tokens=most))
    sizes = set()
    while served.engine.has_unfinished():
        served.step()
        if len(served.scheduler.requests) == 4:
            sizes.add(tuple(map(len, in_flight(served))))
    assert (2, 2) in sizes
    served.check_empty()


def test_all_chunks_of_a_prompt_are_in_flight_and_its_next_token_waits(serve):
    served = serve(stages=3, max_batch=2, max_tokens=8, num_pages=20, page_size=4)
    prompt = list(range(1, 21))
    served.engine.add_request("a", prompt, GREEDY)
    assert served.step() == served.step() == served.step() == []
    assert [batch.chunks[0].length for batch in served.scheduler._in_flight] == [8, 8, 4]
    for left in ([8, 4], [4]):
        assert served.step() == [], "the chunk samples nothing, and the next token waits for the last one"
        assert [batch.chunks[0].length for batch in served.scheduler._in_flight] == left
    (output,) = served.step()
    assert output.outputs[0].token_ids == served.expected(prompt, GREEDY)[:1]
    assert served.drain()["a"].outputs[0].token_ids == served.expected(prompt, GREEDY)


def test_a_preempted_sequence_waits_for_its_token_in_flight(serve):
    """Few pages: sequences lose theirs while a token of them is in flight, which counts."""
    served = serve(stages=3, max_batch=6, max_tokens=32, num_pages=13, page_size=2, max_seq_len=24)
    params = SamplingParams(temperature=0, max_tokens=16)
    for index in range(6):
        served.engine.add_request(f"{index}", [index + 1, 3], params)
    preempted = 0
    while served.engine.has_unfinished():
        for output in served.step():
            if output.finished:
                prompt = [int(output.request_id) + 1, 3]
                assert output.outputs[0].token_ids == served.expected(prompt, params)
        preempted += sum(one.in_flight > 0 for one in served.scheduler.waiting)
    assert preempted > 0 and served.scheduler.num_preemptions > 0
    served.check_empty()


def test_aborts_and_failures_leave_the_engine_usable(serve):
    served = serve(stages=3, max_batch=6, max_tokens=32, num_pages=40)
    for index in range(5):
        served.engine.add_request(f"{index}", [index + 1], LONG)
    for _ in range(4):
        served.step()
    assert served.engine.abort("1").outputs[0].finish_reason == "abort"
    assert served.drain()["0"].outputs[0].token_ids == served.expected([1], LONG)
    served.engine.add_request("again", [9], LONG)
    served.step()
    served.device.fail_at = served.device.num_launches + 1
    served.engine.add_request("other", [8], LONG)
    with pytest.raises(RuntimeError, match="on fire"):
        served.step()
    assert not served.engine.has_unfinished() and served.scheduler.rows.num_free == 6


def test_more_steps_than_stages_are_refused(serve):
    served = serve(stages=3, max_batch=8, max_tokens=64, num_pages=200)
    for index in range(8):
        served.engine.add_request(f"{index}", [index + 1], GREEDY)
    for _ in range(4):
        assert served.scheduler.schedule() is not None
    with pytest.raises(InternalError, match="4 steps are in flight"):
        served.scheduler.schedule()
    with pytest.raises(OptionError, match="stages = 0"):
        SchedulerConfig(1, 1, 1, stages=0)
