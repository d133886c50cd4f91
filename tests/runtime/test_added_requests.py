"""What may be asked for: prompts, parameters and ids; one that may not be fails the call before anything is queued."""

import numpy as np
import pytest
from served import GREEDY

from ingot.ir.errors import RequestError
from ingot.runtime.engines.engine import EngineRequest
from ingot.runtime.params.sampling_params import SamplingParams


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
