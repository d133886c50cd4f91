"""A request that gives up its pages goes on later, and its tokens are what they would have been."""

from small_scheduler import request_of, scheduler_of, values

from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.request import Status


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
    assert (len(a.pages[0]), len(b.pages[0]), scheduler.pages.pools[0].num_free) == (2, 2, 0)
    batches, tokens = [third], iter(range(100, 200))
    while b.preemptions == 0:
        batches.append(scheduler.schedule())
        last = scheduler.requests["b"].in_flight
        if b.preemptions == 0:
            scheduler.retire(batches.pop(0), [next(tokens), next(tokens)])
    # a needs a third page. b's pages are still used by the step in flight, so a waits for it too.
    assert last == 1 and b.status is Status.WAITING and b.num_computed == 0 and a.preemptions == 0
    assert scheduler.pages.pools[0].num_releasing == 2 and batches[-1] is None
    outputs = len(b.output_ids)
    scheduler.retire(batches[0], [next(tokens), next(tokens)])
    assert len(b.output_ids) == outputs + 1 and b.in_flight == 0
    got = values(scheduler.schedule())
    assert got["starts"] == [8] and got["tokens"] == [a.output_ids[-1]] and scheduler.waiting[0] is b


def test_what_was_taken_back_is_looked_at_again():
    scheduler = scheduler_of()
    for name in "ab":
        scheduler.add(request_of(name, 3, presence_penalty=0.5))
    batches = [scheduler.schedule()]
    for _ in range(3):
        batches.append(scheduler.schedule())
        scheduler.retire(batches.pop(0), [50, 60])
    newest = scheduler.schedule()
    a, b = newest.decodes
    before = a.num_computed
    assert newest.chunks == () and newest.inputs.recounts == () and newest.requests == (a, b)
    assert scheduler.withdraw(newest) is None and b.status is Status.WAITING
    again = scheduler.schedule()
    assert again.decodes == () and again.requests == (a,) and a.num_computed == before
    assert [one.row for one in again.inputs.recounts] == [a.row]


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
