"""Steps that the device has no memory for: they are made smaller, nothing is lost, and it comes to an end."""

import random

import pytest
from served import EDITED

from ingot.ir.errors import StepMemoryError
from ingot.runtime.params.sampling_params import SamplingParams

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=9),
    "drawn": SamplingParams(temperature=0.8, seed=5, max_tokens=9),
    "penalized": SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=9),
    "edited": EDITED,
    "scored": SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=9),
}


def served_prompts(serve, seed=0, count=6, **options):
    """Requests of every kind, in turn, that wait to be served."""
    draw = random.Random(seed)
    served = serve(max_batch=4, max_tokens=16, permute_seed=seed, words=True, **options)
    asked = {}
    for index in range(count):
        prompt = [draw.randrange(900) for _ in range(draw.choice([1, 3, 8, 20]))]
        asked[str(index)] = prompt, list(PARAMS.values())[index % len(PARAMS)]
        served.engine.add_request(str(index), *asked[str(index)])
    return served, asked


def check_all(served, asked, last):
    for name, (prompt, params) in asked.items():
        (output,) = last[name].outputs
        assert output.token_ids == served.expected(prompt, params, seed=params.seed or 0)
        served.check_logprobs(last[name], params)


@pytest.mark.parametrize("fails", range(1, 14))
def test_a_step_that_fails_once_changes_no_token(serve, fails):
    served, asked = served_prompts(serve)
    steps = []  # of several sequences: one alone would end

    def has_memory(inputs):
        steps.extend([inputs] if inputs.sizes.B > 1 else [])
        return inputs.sizes.B == 1 or len(steps) != fails

    served.device.has_memory = has_memory
    check_all(served, asked, served.drain())
    assert len(steps) >= fails, "no step failed"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(12))
def test_steps_that_fail_at_random_change_no_token(serve, seed):
    served, asked = served_prompts(serve, seed, count=9, num_pages=24)
    draw, failed = random.Random(seed), []
    # A step of one sequence has memory: else it would end.
    served.device.has_memory = lambda inputs: inputs.sizes.B == 1 or draw.random() > 0.3 or failed.append(1)
    check_all(served, asked, served.drain())
    assert failed and served.scheduler.num_preemptions >= len(failed)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_as_many_run_side_by_side_as_there_is_memory_for(serve, most):
    served, asked = served_prompts(serve)
    failed = []
    served.device.has_memory = lambda inputs: most >= inputs.sizes.B or failed.append(1)
    check_all(served, asked, served.drain())
    # Once for each size that is too large, and again after each end, which makes room for trying.
    assert 4 - most <= len(failed) <= (4 - most) * len(asked)


def test_only_the_last_admitted_is_preempted(serve):
    served = serve()
    for name in "abc":
        served.engine.add_request(name, [1, 2], PARAMS["greedy"])
    served.step()
    served.device.has_memory = lambda inputs: inputs.sizes.B < 3
    served.step()
    assert [request.preemptions for request in served.scheduler.requests.values()] == [0, 0, 1]
    assert len(served.scheduler.running) == 2
    served.drain()


def test_after_an_end_as_many_run_as_before(serve):
    served = serve(max_batch=4)
    for name in "abcde":
        served.engine.add_request(name, [1, 2], SamplingParams(temperature=0, max_tokens=2 if name == "a" else 9))
    sizes = []
    served.device.has_memory = lambda inputs: sizes.append(inputs.sizes.B) or len(sizes) > 1
    served.drain()
    assert sizes[:2] == [4, 3] and max(sizes[2:]) == 4


def test_a_sequence_that_does_not_fit_alone_ends_and_says_so(serve):
    served = serve()
    served.device.has_memory = lambda inputs: inputs.sizes.T < 10
    short, long = ([1, 2, 3], PARAMS["greedy"]), ([4] * 12, PARAMS["greedy"])
    for name, asked in {"long": long, "short": short, "again": long}.items():
        served.engine.add_request(name, *asked)
    last = served.drain(max_steps=100)
    for name in ("long", "again"):
        (output,) = last[name].outputs
        assert (output.finish_reason, output.stop_reason, output.token_ids) == ("error", "no memory for a step", [])
    assert last["short"].outputs[0].token_ids == served.expected(*short)


@pytest.mark.parametrize("stream", [False, True])
def test_a_sequence_that_ends_so_keeps_its_tokens_and_its_group_goes_on(serve, stream):
    served = serve()
    params = SamplingParams(temperature=0.5, seed=3, n=2, max_tokens=30)
    served.engine.add_request("r", [1, 2], params, stream=stream)
    grows = next(iter(served.scheduler.requests.values()))
    served.device.has_memory = lambda inputs: grows.num_computed < 9 or grows.row not in inputs["rows"].tolist()
    first, second = served.drain(max_steps=200)["r"].outputs
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert first.stop_reason == "no memory for a step" and len(first.token_ids) == 7
    assert first.token_ids == served.expected([1, 2], params, 3)[: len(first.token_ids)]
    assert second.token_ids == served.expected([1, 2], params, 4)


def test_who_asks_the_executor_alone_gets_the_error(serve):
    served = serve()
    served.device.has_memory = lambda inputs: False
    served.engine.add_request("r", [1], PARAMS["greedy"])
    batch = served.scheduler.schedule()
    with pytest.raises(StepMemoryError):
        served.device.launch(batch.inputs)
