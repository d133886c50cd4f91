import random
from dataclasses import replace

import numpy as np
import pytest

from ingot.ir.errors import InternalError, RequestError
from ingot.runtime.detokenizer import Detokenizer
from ingot.runtime.engine import Engine, EngineRequest
from ingot.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def texts(serve, tokenizer):
    """A served byte-level model that says `says` after the prompt "go", then `<eos>`."""

    def make(says="one two three", **options):
        served = serve(tokenizer=tokenizer, max_tokens=32, **options)
        served.says = tokenizer.encode(says)
        served.device.script(tokenizer.encode("go"), [*served.says, *tokenizer.eos_token_ids, *[3] * 40])
        return served

    return make


def run(served, prompt="go", **params):
    served.engine.add_request("r", prompt, SamplingParams(**{"temperature": 0, "max_tokens": 40, **params}))
    output = served.drain()["r"]
    assert output.finished
    return output.outputs[0]


# How a sequence ends.


def test_end_token(texts, tokenizer):
    served = texts()
    got = run(served)
    assert (got.text, got.finish_reason, got.stop_reason) == ("one two three", "stop", None)
    assert got.token_ids == [*served.says, *tokenizer.eos_token_ids]


def test_end_token_in_text_when_asked(texts):
    assert run(texts(), include_stop_str_in_output=True, skip_special_tokens=False).text == "one two three<eos>"
    assert run(texts(), include_stop_str_in_output=True).text == "one two three"  # a special token is skipped


def test_ignore_eos(texts):
    got = run(texts(), ignore_eos=True, max_tokens=30)
    assert got.finish_reason == "length" and len(got.token_ids) == 30


def test_stop_token_id(texts, tokenizer):
    served = texts("a b c")
    got = run(served, stop_token_ids=[served.says[2]])
    assert (got.finish_reason, got.stop_reason) == ("stop", served.says[2])
    assert got.token_ids == served.says[:3] and got.text == tokenizer.decode(served.says[:2])
    got = run(texts("a b c"), stop_token_ids=[served.says[2]], include_stop_str_in_output=True)
    assert got.text == tokenizer.decode(served.says[:3])


def test_an_end_token_given_as_stop_token(texts, tokenizer):
    (eos,) = tokenizer.eos_token_ids
    assert run(texts(), stop_token_ids=[eos]).stop_reason is None  # the model's own end comes first, as in vLLM
    assert run(texts(), stop_token_ids=[eos], ignore_eos=True).stop_reason == eos


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
def test_stop_string(texts, tokenizer, include, text):
    got = run(texts(), stop=["two", "three"], include_stop_str_in_output=include)
    assert (got.text, got.finish_reason, got.stop_reason) == (text, "stop", "two")
    assert tokenizer.decode(got.token_ids).startswith("one two")


def test_length(texts, tokenizer):
    served = texts()
    got = run(served, max_tokens=3)
    assert (got.finish_reason, got.stop_reason, got.token_ids) == ("length", None, served.says[:3])
    assert got.text == tokenizer.decode(served.says[:3])


def test_a_stop_that_comes_with_the_last_token_wins(texts):
    served = texts()
    count = len(served.says)
    assert run(served, max_tokens=count, stop="three").finish_reason == "stop"
    assert run(texts(), max_tokens=count + 1).finish_reason == "stop"
    assert run(texts(), max_tokens=count).finish_reason == "length"


def test_max_tokens_none_goes_to_the_limit(serve):
    served = serve(max_seq_len=20)
    served.engine.add_request("r", [1, 2, 3], SamplingParams(temperature=0, max_tokens=None))
    got = served.drain()["r"].outputs[0]
    assert len(got.token_ids) == 17 and got.finish_reason == "length"


def test_a_cut_character_ends_in_a_replacement(texts):
    served = texts("été 🙂")
    whole = served.says
    for count in range(1, len(whole) + 1):
        got = run(texts("été 🙂"), max_tokens=count)
        assert got.text == served.engine._tokenizer.decode(whole[:count])


def test_logits_that_are_not_finite_end_that_request_alone(serve):
    served = serve()
    expected = {name: served.expected([index], GREEDY) for index, name in enumerate("abc")}
    served.device.invalid = lambda context: context[0] == 1 and len(context) > 4
    for index, name in enumerate("abc"):
        served.engine.add_request(name, [index], GREEDY)
    last = served.drain()
    assert last["b"].outputs[0].finish_reason == "error" and last["b"].finished
    assert last["b"].outputs[0].token_ids == expected["b"][:4]
    assert all(last[name].outputs[0].token_ids == expected[name] for name in "ac")


# Streaming.


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


# Several sequences, seeds.


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


# Prompts.


@pytest.mark.parametrize("form", [lambda p: p, lambda p: {"prompt": p}], ids=["text", "dict"])
def test_text_prompts(texts, tokenizer, form):
    served = texts()
    served.engine.add_request("r", form("go"), GREEDY)
    last = served.drain()["r"]
    assert last.prompt == "go" and last.prompt_token_ids == tokenizer.encode("go")


@pytest.mark.parametrize("form", [list, tuple, lambda p: {"prompt_token_ids": p}, lambda p: [np.int64(t) for t in p]])
def test_token_prompts(serve, form):
    served = serve()
    served.engine.add_request("r", form([1, 2, 3]), GREEDY)
    last = served.drain()["r"]
    assert last.prompt is None and last.prompt_token_ids == [1, 2, 3]
    assert last.outputs[0].token_ids == served.expected([1, 2, 3], GREEDY) and last.outputs[0].text == ""


BAD_PROMPTS = [
    [],
    [997],
    [-1],
    [1.0],
    [True],
    ["a"],
    [None],
    [1] * 64,
    {},
    {"prompt_token_ids": "abc"},
    {"prompt": [1]},
    {"prompt": "a", "prompt_token_ids": [1]},
    {"prompts": [1]},
    {1: 2},
    None,
    7,
    b"bytes",
    "text without a tokenizer",
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
def test_a_bad_prompt_fails_the_call_before_anything_is_queued(serve, prompt):
    served = serve()
    with pytest.raises(RequestError):
        served.engine.add_requests([EngineRequest("good", [1, 2], GREEDY), EngineRequest("bad", prompt, GREEDY)])
    assert not served.engine.has_unfinished()
    served.check_empty()
    served.engine.add_request("good", [1, 2], GREEDY)
    assert served.drain()["good"].outputs[0].token_ids == served.expected([1, 2], GREEDY)


def test_empty_text(texts):
    with pytest.raises(RequestError, match="empty"):
        texts().engine.add_request("r", "", GREEDY)


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, SamplingParams(stop="x"), SamplingParams(stop_token_ids=[997])], ids=repr
)
def test_parameters_that_do_not_fit_the_model(serve, params):
    served = serve()
    with pytest.raises(RequestError):
        served.engine.add_request("a", [1], params)
    assert not served.engine.has_unfinished()


def test_ids_are_not_shared_but_reusable(serve):
    served = serve()
    served.engine.add_request("a", [1], GREEDY)
    with pytest.raises(RequestError, match="in use"):
        served.engine.add_request("a", [1], GREEDY)
    with pytest.raises(RequestError, match="in use"):
        served.engine.add_requests([EngineRequest("b", [1], GREEDY)] * 2)
    served.drain()
    served.engine.add_request("a", [1], GREEDY)
    served.drain()


# Aborts and failures.


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
    served.scheduler._free_rows.clear()
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


# min_tokens and log-probabilities.


@pytest.mark.parametrize("own", [False, True])
def test_end_tokens_are_held_back_until_min_tokens(serve, own):
    prompt, plain = [5, 6], serve().expected([5, 6], GREEDY)
    for place in range(1, 7):
        end = plain[place]
        for count in (place, place + 1):
            served = serve(eos=[end]) if own else serve()
            ends = {} if own else {"stop_token_ids": (end,)}
            params = replace(GREEDY, min_tokens=count, **ends)
            served.engine.add_request("r", prompt, params)
            got, expected = served.drain()["r"].outputs[0].token_ids, served.expected(prompt, params)
            if count == place:  # the first place where it may stand
                assert got == plain[: place + 1]
            else:
                assert got[place] != end and got == expected[: len(got)] and len(got) > count


def test_an_end_token_that_the_model_does_not_have_is_not_held_back(serve):
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=5)
    served = serve(eos=[serve().vocab, 128001])
    served.engine.add_request("a", [1, 2], params)
    assert served.drain()["a"].outputs[0].token_ids == serve().expected([1, 2], params)


def test_an_end_token_that_is_ignored_is_not_held_back(serve):
    plain = serve().expected([5, 6], GREEDY)
    served = serve(eos=[plain[2]])
    served.engine.add_request("r", [5, 6], replace(GREEDY, min_tokens=8, ignore_eos=True))
    assert served.drain()["r"].outputs[0].token_ids == plain


def test_a_stop_string_counts_after_min_tokens(texts, tokenizer):
    says = tokenizer.encode("one two one two")
    first = next(n for n in range(len(says)) if "two" in tokenizer.decode(says[:n]))
    for count in range(len(says)):
        got = run(texts("one two one two"), stop="two", min_tokens=count)
        assert got.text == ("one " if count < first else "one two one ") and got.stop_reason == "two"
        assert len(got.token_ids) > count


def test_text_that_is_held_back_may_end_a_stop_string_after_min_tokens(texts, tokenizer):
    """A stop string that begins within the first tokens and ends behind them counts."""
    says = tokenizer.encode("one two three")
    whole = next(n for n in range(len(says)) if "two thr" in tokenizer.decode(says[:n]))
    for count in range(len(says)):
        got = run(texts(), stop="two thr", min_tokens=count)
        assert got.text == ("one " if count < whole else "one two three"), count


def test_logprobs_of_text_name_their_tokens(texts, tokenizer):
    served = texts(" two ☃")
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=1)
    served.engine.add_request("r", "go", params)
    output = served.drain()["r"]
    served.check_logprobs(output, params)
    (sequence,) = output.outputs
    chosen = [entry[token].decoded_token for entry, token in zip(sequence.logprobs, sequence.token_ids, strict=True)]
    assert chosen[-1] == "<eos>" and "�" in chosen, "a special token, and a part of a character"
    served = texts()
    served.engine.add_request("r", "go", replace(params, detokenize=False))
    assert {one.decoded_token for entry in served.drain()["r"].outputs[0].logprobs for one in entry.values()} == {None}


def test_a_prompt_is_rated_once_for_all_its_sequences(serve):
    served = serve(max_batch=3, max_tokens=7)
    params = SamplingParams(n=4, max_tokens=3, seed=1, logprobs=1, prompt_logprobs=2)
    served.engine.add_request("r", list(range(20)), params)
    served.engine.add_request("s", list(range(9)), replace(params, n=1, logprobs=None))
    last = served.drain()
    served.check_logprobs(last["r"], params)
    served.check_logprobs(last["s"], replace(params, logprobs=None))
    assert served.device.num_rated == 19 + 8


def test_a_token_that_is_none_has_no_logprob(serve):
    served = serve()
    served.device.invalid = lambda context: len(context) == 5
    served.engine.add_request("r", [1, 2, 3], replace(GREEDY, logprobs=1))
    (got,) = served.drain()["r"].outputs
    assert got.finish_reason == "error" and len(got.token_ids) == len(got.logprobs) == 2


def test_an_aborted_request_keeps_the_logprobs_it_has(serve):
    served = serve(max_tokens=6)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0, seed=1)
    served.engine.add_request("r", list(range(20)), params)
    for _ in range(3):
        served.step()
    output = served.engine.abort("r")
    assert len(output.prompt_logprobs) == 13  # two steps have retired
    served.check_logprobs(output, params)
    assert served.drain() == {}


def test_more_end_tokens_than_can_be_held_back(serve):
    served = serve(eos=[1, 2])
    params = SamplingParams(min_tokens=2, stop_token_ids=list(range(2, 17)))
    served.engine.add_request("r", [5], params)
    with pytest.raises(RequestError, match="17 end tokens"):
        served.engine.add_request("s", [5], replace(params, stop_token_ids=(*params.stop_token_ids, 17)))
    served.drain()
