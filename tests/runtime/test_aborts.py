"""An abort frees what a request holds, and gives what it has so far."""

import random

import pytest
from served import GREEDY

from ingot.runtime.params.sampling_params import SamplingParams


@pytest.mark.parametrize("steps", range(6))
def test_abort_frees_everything_after_the_step_in_flight(serve, steps):
    served = serve(max_tokens=4)
    served.engine.add_request("a", [1] * 9, SamplingParams(n=2, max_tokens=20, temperature=1.0))
    served.engine.add_request("b", [2], GREEDY)
    for _ in range(steps):
        served.step()
    output = served.engine.abort("a")
    assert output.finished and {got.finish_reason for got in output.outputs} == {"abort"}
    assert served.engine.abort("a") is None and served.engine.abort("never seen") is None
    served.check()
    last = served.drain()
    assert set(last) == {"b"} and last["b"].outputs[0].token_ids == served.expected([2], GREEDY)


@pytest.mark.parametrize("steps", range(5))
def test_a_storm_of_aborts_leaves_nothing_behind_one_step(serve, steps):
    served = serve(num_pages=12, max_tokens=8)
    params = SamplingParams(n=2, max_tokens=20, temperature=1.0)
    for number in range(40):
        served.engine.add_request(str(number), [number] * (1 + number % 11), params if number % 3 else GREEDY)
    for _ in range(steps):
        served.step()
    for number in random.Random(steps).sample(range(40), 40):
        assert served.engine.abort(str(number)).finished
        served.check()
    assert served.engine.has_unfinished() == (steps > 0) and served.pool.num_held == 0
    if steps:
        assert served.step() == []  # the step in flight, whose requests have ended
    served.check_empty()
    served.engine.add_request("a", [1, 2, 3], GREEDY)
    assert served.drain()["a"].outputs[0].token_ids == served.expected([1, 2, 3], GREEDY)


def test_abort_keeps_sequences_that_have_ended(serve):
    served = serve(max_batch=1)
    served.engine.add_request("a", [1], SamplingParams(n=2, max_tokens=3))
    for _ in range(5):
        served.step()
    assert [got.finish_reason for got in served.engine.abort("a").outputs] == ["length", "abort"]
    served.drain()


def test_abort_shows_held_text(texts):
    served = texts("one END")
    served.engine.add_request("r", "go", SamplingParams(temperature=0, max_tokens=40, stop="END of it"))
    while served.engine._groups["r"].sequences[0].request.output_ids != served.says:
        served.step()
    assert served.engine.abort("r").outputs[0].text == "one END"
    served.drain()
