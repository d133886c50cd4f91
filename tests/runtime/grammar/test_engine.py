"""Grammars in an engine on a simulated device: late endings, ends, preemption, and requests beside them."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from ingot.ir.errors import RequestError
from ingot.runtime.grammar.compiled import Grammars
from ingot.runtime.grammar.params import FAILED
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.text.tokenizer import Tokenizer

REGEX = {"regex": "[a-f]{2}( [0-9]{1,3}){1,6}"}
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=48, structured_outputs=REGEX)
PLAIN = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def served(serve: Any, tokenizer: Tokenizer, grammars: Grammars) -> Any:
    """`served(**options)`: an engine with the tokenizer; its grammars are compiled once for all tests."""

    def make(**options: Any) -> Any:
        made = serve(tokenizer=tokenizer, **{"max_tokens": 32, **options})
        made.engine.grammars = grammars
        return made

    return make


@pytest.mark.parametrize("stages", [1, 3])
def test_outputs_match_and_others_are_unchanged(served: Any, stages: int) -> None:
    with_grammars, alone = served(stages=stages), served()
    for number in range(4):
        with_grammars.engine.add_request(f"g{number}", [1, 2, number], replace(PARAMS, seed=number))
        with_grammars.engine.add_request(f"p{number}", [7, number], PLAIN)
        alone.engine.add_request(f"p{number}", [7, number], PLAIN)
    found, expected = with_grammars.drain(), alone.drain()
    for number in range(4):
        one = found[f"g{number}"].outputs[0]
        assert one.finish_reason == "stop" and re.fullmatch(REGEX["regex"], one.text), one
        assert found[f"p{number}"].outputs[0] == expected[f"p{number}"].outputs[0]
    assert with_grammars.device.num_masked and not alone.device.num_masked
    assert not with_grammars.scheduler._tables.num_masked and not with_grammars.scheduler._tables.edited


def test_a_step_without_grammars_waits_for_nothing(served: Any) -> None:
    made = served()
    late: list[bool] = []
    launch = made.device.launch

    def noted(inputs: Any) -> Any:
        late.append(inputs.ends_late)
        return launch(inputs)

    made.device.launch = noted
    made.engine.add_request("g", [1, 2], PARAMS)
    made.drain()
    assert all(late)
    late.clear()
    made.engine.add_request("p", [1, 2], PLAIN)
    made.drain()
    assert late and not any(late) and made.engine._masks is not None


def test_n_sequences_follow_the_grammar_each_for_itself(served: Any) -> None:
    made = served()
    made.engine.add_request("a", [1, 2], replace(PARAMS, n=4))
    texts = [one.text for one in made.drain()["a"].outputs]
    assert len(set(texts)) > 1 and all(re.fullmatch(REGEX["regex"], text) for text in texts)


def test_preempted_sequences_go_on_in_their_grammar(served: Any) -> None:
    made, roomy = served(num_pages=14, page_size=4, prefix_caching=False), served()
    params = replace(PARAMS, structured_outputs={"regex": "([a-f]{4} ){8}"})
    for one in (made, roomy):
        for number in range(4):
            one.engine.add_request(str(number), [1, 2, 3, number], replace(params, seed=number))
    found, expected = ({key: out.outputs for key, out in one.drain().items()} for one in (made, roomy))
    assert found == expected and all(out[0].finish_reason == "stop" for out in found.values())
    assert made.scheduler.num_preemptions and not roomy.scheduler.num_preemptions


def test_sequences_with_drafts_run_beside_grammars(served: Any) -> None:
    made = served(drafts=3, page_size=8)
    alone = served(drafts=3, page_size=8)
    for number in range(2):
        made.engine.add_request(f"g{number}", [1, 2, number], replace(PARAMS, seed=number))
        made.engine.add_request(f"p{number}", [7, number], PLAIN)
        alone.engine.add_request(f"p{number}", [7, number], PLAIN)
    found, expected = made.drain(), alone.drain()
    for number in range(2):
        assert re.fullmatch(REGEX["regex"], found[f"g{number}"].outputs[0].text)
        assert found[f"p{number}"].outputs[0] == expected[f"p{number}"].outputs[0]
    assert made.device.num_kept and made.device.num_masked


def test_steps_without_memory_are_tried_again(served: Any) -> None:
    made, calm = served(), served()
    draw = random.Random(3)
    made.device.has_memory = lambda inputs: inputs.sizes.B == 1 or draw.random() < 0.8
    for one in (made, calm):
        for number in range(3):
            one.engine.add_request(str(number), [1, 2, number], replace(PARAMS, seed=number))
    found, expected = made.drain(), calm.drain()
    assert made.device.num_refused
    for key, one in expected.items():
        assert found[key].outputs == one.outputs


def test_ends(served: Any, tokenizer: Tokenizer) -> None:
    made = served()
    choice = {"choice": ["the cat"]}
    asked = {
        "whole": SamplingParams(max_tokens=16, structured_outputs=choice),
        "cut": SamplingParams(max_tokens=2, structured_outputs={"choice": ["🙂🙂🙂🙂"]}),
        "stopped": SamplingParams(max_tokens=16, structured_outputs=choice, stop=["e c"]),
        "token": SamplingParams(max_tokens=16, structured_outputs=choice, stop_token_ids=tokenizer.encode("the")[-1:]),
        "on": SamplingParams(max_tokens=16, structured_outputs=choice, ignore_eos=True),
        "least": SamplingParams(max_tokens=16, structured_outputs=choice, min_tokens=12),
        "logprobs": SamplingParams(max_tokens=16, structured_outputs=choice, logprobs=2, prompt_logprobs=1),
    }
    for key, params in asked.items():
        made.engine.add_request(key, tokenizer.encode("go"), params)
    found = {key: one.outputs[0] for key, one in made.drain().items()}
    assert (found["whole"].text, found["whole"].finish_reason) == ("the cat", "stop")
    assert found["cut"].finish_reason == "length" and len(found["cut"].token_ids) == 2
    assert (found["stopped"].text, found["stopped"].stop_reason) == ("th", "e c")
    assert found["token"].finish_reason == "stop" and isinstance(found["token"].stop_reason, int)
    assert found["on"].finish_reason == "length" and found["on"].text.startswith("the cat")
    assert len(found["on"].token_ids) == 16
    assert (found["least"].text, found["least"].finish_reason) == ("the cat", "stop")
    assert len(found["logprobs"].logprobs or ()) == len(found["logprobs"].token_ids)


def test_a_dead_end_ends_its_request_alone(served: Any, tokenizer: Tokenizer) -> None:
    """The biases and limits of a request may contradict its grammar: only the third character shows it."""
    made = served()
    allowed = [*tokenizer.encode("日"), tokenizer.encode("a")[0]]
    stuck = SamplingParams(max_tokens=16, structured_outputs={"choice": ["日z"]}, allowed_token_ids=allowed)
    made.engine.add_request("stuck", [1], stuck)
    made.engine.add_request("fine", [1], PARAMS)
    made.engine.add_request("plain", [2], PLAIN)
    found = {key: one.outputs[0] for key, one in made.drain().items()}
    assert found["stuck"].finish_reason == "error" and str(found["stuck"].stop_reason).startswith(FAILED)
    assert found["fine"].finish_reason == "stop" and found["plain"].finish_reason == "length"
    assert not made.engine.has_unfinished()


def test_a_model_without_end_tokens_stops_with_its_grammar(serve: Any, tokenizer: Tokenizer) -> None:
    endless = Tokenizer(tokenizer.backend)
    made = serve(tokenizer=endless, max_tokens=32)
    made.engine.add_request("a", [1, 2], SamplingParams(max_tokens=40, structured_outputs={"choice": ["the cat"]}))
    (one,) = made.drain()["a"].outputs
    assert one.finish_reason == "stop" and one.text == "the cat"


def test_aborted_requests_leave_nothing(served: Any) -> None:
    made = served()
    made.engine.add_request("a", [1, 2], PARAMS)
    made.engine.add_request("b", [1, 3], replace(PARAMS, seed=8))
    for _ in range(3):
        made.engine.step()
    made.engine.abort("a")
    assert made.drain()["b"].outputs[0].finish_reason == "stop"
    assert not made.scheduler._tables.num_masked


BAD = {
    "no such keyword": ({"json": {"not": {}}}, '"not"'),
    "no value": ({"json": False}, "Unsatisfiable"),
    "an endless value": ({"json": {"$ref": "#"}}, "no text matches"),
    "no expression": ({"regex": "(a"}, "unclosed group"),
    "an unknown rule": ({"grammar": "start: nowhere"}, "nowhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_grammars(served: Any, name: str) -> None:
    given, message = BAD[name]
    made = served()
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        made.engine.add_request("a", [1, 2], SamplingParams(structured_outputs=given))
    assert caught.value.where.startswith("StructuredOutputsParams") and caught.value.expected
    assert not made.engine.has_unfinished()


def test_grammars_need_a_tokenizer(serve: Any) -> None:
    with pytest.raises(RequestError, match="without a tokenizer"):
        serve().engine.add_request("a", [1], SamplingParams(structured_outputs=REGEX))
