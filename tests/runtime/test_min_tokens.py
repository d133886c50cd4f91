"""What ends a sequence counts behind its `min_tokens`, and no end token is sampled before."""

from dataclasses import replace

import pytest
from served import GREEDY, run

from ingot.ir.errors import RequestError
from ingot.runtime.params.sampling_params import SamplingParams


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


def test_more_end_tokens_than_can_be_held_back(serve):
    served = serve(eos=[1, 2])
    params = SamplingParams(min_tokens=2, stop_token_ids=list(range(2, 17)))
    served.engine.add_request("r", [5], params)
    with pytest.raises(RequestError, match="17 end tokens"):
        served.engine.add_request("s", [5], replace(params, stop_token_ids=(*params.stop_token_ids, 17)))
    served.drain()
