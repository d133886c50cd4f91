"""Who comes first, and who gives up their pages, with the policies "priority" and "fcfs"."""

import random

import pytest

from ingot.ir.errors import OptionError, RequestError
from ingot.runtime.engines.engine import EngineRequest
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def add(served, name, prompt, priority, params=GREEDY):
    served.engine.add_requests([EngineRequest(name, prompt, params, priority=priority)])


def test_the_lower_priority_comes_first_and_then_the_earlier(serve):
    served = serve(max_batch=1, policy="priority")
    for name, priority in {"a": 0, "b": 5, "c": -1, "d": 5, "e": 1}.items():
        add(served, name, [1, 2, 3], priority)
    ended = []
    while served.engine.has_unfinished():
        ended += [output.request_id for output in served.step() if output.finished]
    assert ended == ["c", "a", "e", "b", "d"]


def test_the_least_urgent_gives_up_its_pages(serve):
    served = serve(num_pages=11, max_tokens=32, policy="priority")
    params = SamplingParams(temperature=0, max_tokens=12)
    # The least urgent one came first and runs longest when pages run out.
    prompts = {"low": list(range(9)), "high": list(range(20, 29)), "middle": list(range(40, 49))}
    add(served, "low", prompts["low"], 2, params)
    served.step()
    add(served, "high", prompts["high"], -2, params)
    add(served, "middle", prompts["middle"], 0, params)
    requests = list(served.scheduler.requests.values())
    last = served.drain()
    assert [request.preemptions > 0 for request in requests] == [True, False, False]
    assert all(last[name].outputs[0].token_ids == served.expected(prompt, params) for name, prompt in prompts.items())


@pytest.mark.parametrize("seed", range(5))
def test_random_priorities_change_no_token(serve, seed):
    draw = random.Random(seed)
    served = serve(num_pages=14, max_batch=3, permute_seed=seed, policy="priority")
    work, last = {}, {}
    for index in range(20):
        prompt = [draw.randrange(3) for _ in range(draw.randint(1, 20))]
        params = SamplingParams(seed=index, max_tokens=draw.randint(1, 24), n=draw.choice([1, 1, 2]))
        work[str(index)] = prompt, params
        add(served, str(index), prompt, draw.choice([-3, 0, 0, 7]), params)
        last.update({output.request_id: output for _ in range(draw.randrange(3)) for output in served.step()})
    last.update(served.drain())
    assert served.scheduler.num_preemptions
    for name, (prompt, params) in work.items():
        for index, output in enumerate(last[name].outputs):
            assert output.token_ids == served.expected(prompt, params, params.seed + index)


def test_a_priority_where_there_are_none(serve):
    served = serve()
    with pytest.raises(RequestError, match="priority 1 with"):
        add(served, "a", [1], 1)
    assert not served.engine.has_unfinished()


def test_no_such_policy():
    with pytest.raises(OptionError, match="fcfs or priority"):
        SchedulerConfig(4, 16, 64, policy="sjf")
