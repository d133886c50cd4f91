"""What is done while the host waits: as much as fits in, and never while requests could be served."""

import math

from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.spare_time import SpareTime
from ingot.runtime.params.sampling_params import SamplingParams


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_time_left_is_that_of_the_step_that_runs():
    clock, given = Clock(), []
    spare = SpareTime(lambda seconds: bool(given.append(seconds)), clock)
    spare.begin()
    spare.wait(1000)
    assert given == []  # no step was measured yet
    clock.now += 2.0
    spare.end(1000)  # 2 ms a token
    clock.now += 0.25
    spare.wait(500)
    assert given == [0.75]  # of one second, since the step began when the one before it ended
    clock.now += 5.0
    spare.wait(500)
    assert given == [0.75]  # it took longer than expected
    spare.end(500)
    spare.wait(4)
    clock.now += 0.001
    spare.end(4)  # a step of few tokens tells nothing of others
    spare.wait(1000)
    assert len(given) == 2 and math.isclose(given[1], 1000 * 5.25 / 500)
    assert spare.steps == 3 and math.isclose(spare.waited, 2.001)  # work for later steps is no waiting
    clock.now += 60
    spare.begin()  # after a pause
    spare.wait(1000)
    assert math.isclose(given[2], 1000 * 5.25 / 500)


def test_an_engine_works_while_it_idles_and_in_long_steps(serve):
    served, given = serve(max_tokens=512, max_seq_len=2048, max_batch=2, num_pages=512), []

    def work(seconds):
        given.append((seconds, served.engine.has_unfinished()))
        return len(given) < 3

    engine = served.engine = Engine(served.device, served.scheduler, vocab_size=served.vocab, work=work)
    assert engine.idle() and given == [(math.inf, False)]
    engine.add_request("a", [1] * 1500, SamplingParams(temperature=0, max_tokens=4))
    assert not engine.idle() and len(given) == 1
    served.drain()
    assert 1 <= len(given) - 1 <= 2  # the second and the third piece of the prompt, and no step of one token
    assert all(0 < seconds < 10 and busy for seconds, busy in given[1:])
    assert not engine.idle()
