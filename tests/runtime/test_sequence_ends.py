"""How a sequence ends: at an end token, a stop, its length, or logits that are not finite."""

import pytest
from served import GREEDY, run

from ingot.runtime.params.sampling_params import SamplingParams


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
