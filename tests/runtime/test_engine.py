"""The engine: streamed outputs, several sequences and their seeds, failures, and one step in flight."""

import random
from dataclasses import replace

import pytest
from served import GREEDY, run

from ingot.ir.errors import InternalError, RequestError
from ingot.runtime.engines.engine import Engine, EngineRequest
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.text.detokenizer import Detokenizer


def test_streamed_text_only_grows_and_never_shows_part_of_a_stop_string(texts):
    served = texts("one 日本語 STOPPER STOP end")
    served.engine.add_request("r", "go", SamplingParams(temperature=0, max_tokens=60, stop=["STOP "]))
    seen, seen_ids = "", []
    while served.engine.has_unfinished():
        for output in served.step():
            (got,) = output.outputs
            assert got.text.startswith(seen) and got.token_ids[: len(seen_ids)] == seen_ids
            assert "\ufffd" not in got.text and not got.text.endswith(("S", "ST", "STO", "STOP"))
            seen, seen_ids = got.text, got.token_ids
    assert seen == "one 日本語 STOPPER " and got.finish_reason == "stop"


def test_one_output_per_token_unless_not_streamed(serve):
    served = serve()
    served.engine.add_request("a", [1], GREEDY)
    served.engine.add_request("b", [1], GREEDY, stream=False)
    outputs = []
    while served.engine.has_unfinished():
        outputs += served.step()
    assert [len(output.outputs[0].token_ids) for output in outputs if output.request_id == "a"] == list(range(1, 9))
    assert [output.finished for output in outputs if output.request_id == "b"] == [True]


def test_outputs_do_not_change_afterwards(serve):
    served = serve()
    served.engine.add_request("a", [1, 2], GREEDY)
    outputs = []
    while served.engine.has_unfinished():
        outputs += served.step()
        if outputs:
            outputs[-1].prompt_token_ids.append(3)  # nor do callers change the engine
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 9))
    assert outputs[-1].outputs[0].token_ids == served.expected([1, 2], GREEDY)


def test_n_sequences_with_a_seed_use_the_seeds_after_it(serve):
    served = serve(max_batch=3)
    params = SamplingParams(n=5, seed=2**63 - 3, max_tokens=6)
    served.engine.add_request("a", [4, 5], params)
    last = served.drain()["a"]
    assert [output.index for output in last.outputs] == [0, 1, 2, 3, 4]
    for index, output in enumerate(last.outputs):
        assert output.token_ids == served.expected([4, 5], params, (params.seed + index) % 2**63)


def test_n_sequences_finish_together(serve):
    served = serve(max_batch=1)
    served.engine.add_request("a", [4, 5], SamplingParams(n=3, max_tokens=4))
    outputs = []
    while served.engine.has_unfinished():
        outputs += served.step()
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert len({tuple(output.token_ids) for output in outputs[-1].outputs}) == 3


def test_seeds_drawn_by_the_engine_repeat(serve):
    def tokens(engine_seed):
        served = serve()
        served.engine = Engine(served.device, served.scheduler, vocab_size=served.vocab, seed=engine_seed)
        for name in "ab":
            served.engine.add_request(name, [7], SamplingParams())
        last = served.drain()
        return [last[name].outputs[0].token_ids for name in "ab"]

    assert tokens(0) == tokens(0) != tokens(1)
    first, second = tokens(0)
    assert first != second


def test_a_refused_request_draws_no_seed(serve):
    results = []
    for refused in (False, True):
        served = serve()
        if refused:
            with pytest.raises(RequestError):
                served.engine.add_requests([EngineRequest("a", [1], GREEDY), EngineRequest("b", [], GREEDY)])
        served.engine.add_request("a", [7], SamplingParams())
        results.append(served.drain()["a"].outputs[0].token_ids)
    assert results[0] == results[1]


@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_a_failing_executor_ends_all_requests_and_nothing_leaks(serve, fail_at):
    served = serve()
    served.device.fail_at = fail_at
    for name in "ab":
        served.engine.add_request(name, [1] * 5, GREEDY)
    with pytest.raises(RuntimeError, match="on fire"):
        for _ in range(20):
            served.engine.step()
    assert not served.engine.has_unfinished()
    served.check_empty()
    served.device.launched.clear()
    served.engine.add_request("a", [1, 2, 3], GREEDY)
    assert served.drain()["a"].outputs[0].token_ids == served.expected([1, 2, 3], GREEDY)


def test_an_engine_that_cannot_go_on_says_so(serve):
    served = serve()
    served.engine.add_request("a", [1], GREEDY)
    while served.scheduler.rows.num_free:
        served.scheduler.rows.take()
    with pytest.raises(InternalError, match="no step"):
        served.engine.step()


def test_one_step_is_in_flight(serve):
    served = serve()
    served.engine.add_request("a", [1], GREEDY)
    assert served.step() == [] and len(served.device.launched) == 1
    assert len(served.step()) == 1 and len(served.device.launched) == 1
    assert served.device.num_launches == 2
    served.drain()
    assert served.engine.step() == []


def test_text_is_made_behind_the_launch_of_the_next_step(texts, monkeypatch):
    served, launches, push = texts(), [], Detokenizer.push

    def watched(self, token):
        launches.append(served.device.num_launches)
        push(self, token)

    monkeypatch.setattr(Detokenizer, "push", watched)
    run(served, max_tokens=9, ignore_eos=True)
    assert launches == [*range(2, 10), 9], "there is none behind the last one"


def test_many_texts_with_stops_under_pressure(serve, tokenizer):
    """Text, n, seeds, stop strings and preemption together: the same as each request alone in an ample pool."""
    rng = random.Random(11)
    work = []
    for index in range(12):
        prompt = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 20))]
        stop = rng.choice([None, ["a"], [" t", "e"], ["日"]])
        work.append(
            (prompt, SamplingParams(n=rng.choice([1, 2]), seed=index, max_tokens=rng.randint(1, 20), stop=stop))
        )

    def alone(prompt, params):
        served = serve(tokenizer=tokenizer)
        served.engine.add_request("r", prompt, params)
        return served.drain()["r"].outputs

    served = serve(tokenizer=tokenizer, num_pages=11, page_size=4, max_batch=5, permute_seed=1)
    for index, (prompt, params) in enumerate(work):
        served.engine.add_request(str(index), prompt, params, stream=index % 2 == 0)
    requests = list(served.scheduler.requests.values())
    last = served.drain()
    assert sum(request.preemptions for request in requests) > 0
    assert {got.finish_reason for output in last.values() for got in output.outputs} == {"stop", "length"}
    for index, (prompt, params) in enumerate(work):
        assert last[str(index)].outputs == alone(prompt, params)


@pytest.mark.parametrize("kept", [3, 63, -1])
def test_a_prompt_is_cut_at_its_beginning(serve, kept):
    """-1 leaves what one output token has room after; else a prompt that is too long is refused."""
    served, long = serve(max_seq_len=64), list(range(200))
    params = replace(GREEDY, truncate_prompt_tokens=kept, max_tokens=1)
    served.engine.add_request("a", [7, 8], params)
    served.engine.add_request("b", long, params)
    last, left = served.drain(), long[-(63 if kept < 0 else kept) :]
    assert last["a"].prompt_token_ids == [7, 8] and last["b"].prompt_token_ids == left
    assert last["b"].outputs[0].token_ids == served.expected(left, params)
    with pytest.raises(RequestError, match="200 tokens"):
        served.engine.add_request("c", long, GREEDY)
