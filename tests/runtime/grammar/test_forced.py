"""Forced tokens: several run in one step, and outputs are those of steps of one token."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from random_schemas import schema
from run_seed import run_seed

from ingot.ir.errors import InternalError
from ingot.runtime.grammar.compiled import Grammars
from ingot.runtime.grammar.limits import FAST_SECONDS
from ingot.runtime.grammar.params import StructuredOutputsParams
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.request import End
from ingot.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.one_in_file(3)

RECORD = {
    "type": "object",
    "properties": {
        "identification number": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["person", "place", "thing"]},
        "is available today": {"type": "boolean"},
        "die Katze 日本語": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
    },
    "required": ["identification number", "kind", "is available today", "die Katze 日本語"],
    "additionalProperties": False,
}
JSON = {"json": RECORD, "disable_any_whitespace": True}
GRAMMARS: list[dict[str, Any]] = [
    JSON,
    {"json": RECORD},
    {"json": {"type": "array", "items": RECORD, "minItems": 2, "maxItems": 2}, "disable_any_whitespace": True},
    {"regex": "the cat und die Katze [0-9]{1,2}( the end [a-z]){1,3}"},
    {"choice": ["the cat und die Katze", "the cat und the end", "été déjà vu"]},
    {"grammar": 'root ::= "(" root ")" | "die Katze und the cat " [a-c]'},
]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=400, structured_outputs=JSON)
PLAIN = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
Served = Callable[..., Any]


@pytest.fixture
def served(serve: Any, tokenizer: Tokenizer, grammars: Grammars) -> Served:
    """`served(**options)`: an engine with the tokenizer; `max_forced=1` is one with steps of one token."""

    def make(**options: Any) -> Any:
        defaults = {"max_tokens": 64, "max_seq_len": 512, "num_pages": 512}
        made = serve(tokenizer=tokenizer, **{**defaults, **options})
        made.engine.grammars = grammars
        return made

    return make


def both(served: Served, requests: dict[str, tuple[list[int], SamplingParams]], **options: Any) -> tuple[Any, Any]:
    """Serve the requests with forced tokens and without, and check that their outputs are equal. Returns both."""
    made, plain = served(**options), served(**{**options, "max_forced": 1})
    found: list[dict[str, Any]] = []
    for one in (made, plain):
        for key, (prompt, params) in requests.items():
            one.engine.add_request(key, prompt, params)
        found.append({key: output.outputs for key, output in one.drain().items()})
    assert found[0] == found[1] and found[0].keys() == requests.keys()
    assert made.scheduler.num_forced == made.engine.occupancy.forced_tokens and not plain.scheduler.num_forced
    made.outputs = {key: outputs[0] for key, outputs in found[0].items()}
    return made, plain


@pytest.mark.one_in(4)
@pytest.mark.parametrize("grammar", GRAMMARS, ids=[next(iter(one)) + str(place) for place, one in enumerate(GRAMMARS)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_sequence_has_equal_tokens_in_fewer_steps(served: Served, grammar: Any, temperature: float) -> None:
    params = replace(PARAMS, temperature=temperature, structured_outputs=grammar)
    made, plain = both(served, {"a": ([1, 2, 3], params)})
    saved = made.scheduler.num_forced
    assert saved and plain.device.num_launches - made.device.num_launches == saved, "each saves a step"


def test_a_record_takes_a_step_for_each_run(served: Served) -> None:
    made, plain = both(served, {"a": ([1, 2, 3], PARAMS)})
    assert json.loads(made.outputs["a"].text).keys() == RECORD["properties"].keys()
    assert 2 * made.device.num_launches < plain.device.num_launches
    assert made.device.num_fed == plain.device.num_fed, "they feed the same tokens"


def test_sequences_with_and_without_grammars(served: Served) -> None:
    some = {f"g{n}": ([1, 2, n], replace(PARAMS, seed=n, structured_outputs=GRAMMARS[n])) for n in range(6)}
    others = {f"p{n}": ([7, n], replace(PLAIN, max_tokens=20 + n)) for n in range(6)}
    for rows in (2, 4, 12):
        made, plain = both(served, {**some, **others}, max_batch=rows)
        assert made.scheduler.num_forced and made.device.num_launches < plain.device.num_launches
    alone, _ = both(served, others)
    assert not alone.scheduler.num_forced and alone.outputs == {key: made.outputs[key] for key in others}


def test_each_of_n_sequences_has_its_own(served: Served) -> None:
    made, plain = both(served, {"a": ([1, 2], replace(PARAMS, n=4))})
    assert made.scheduler.num_forced and made.device.num_launches < plain.device.num_launches


def test_long_runs_continue_in_the_next_step(served: Served) -> None:
    text = "die Katze und the cat " * 4
    params = replace(PARAMS, structured_outputs={"choice": [text]})
    steps = {most: both(served, {"a": ([1], params)}, max_forced=most)[0].device.num_launches for most in (2, 8, 32)}
    assert steps[2] > steps[8] > steps[32]


def test_a_step_has_room_for_them(served: Served) -> None:
    some = {str(n): ([1, 2, n], replace(PARAMS, seed=n)) for n in range(5)}
    saved: list[int] = []
    for most in (4, 5, 9, 64):  # `drain` checks the most tokens of a step
        made, _ = both(served, some, max_tokens=most)
        assert made.device.most_tokens == most or most == 64
        saved.append(made.scheduler.num_forced)
    assert saved == sorted(saved) and saved[0] < saved[-1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [4, 16])
def test_preempted_sequences(served: Served, page_size: int) -> None:
    some = {str(n): ([1, 2, 3, n], replace(PARAMS, seed=n)) for n in range(4)}
    for caching in (False, True):
        tight = {"num_pages": 200 // page_size, "page_size": page_size, "max_seq_len": 192, "prefix_caching": caching}
        made, plain = both(served, some, **tight)
        assert made.scheduler.num_preemptions and plain.scheduler.num_preemptions and made.scheduler.num_forced


def test_steps_without_memory(served: Served) -> None:
    made, calm = served(), served()
    draw = random.Random(3)
    made.device.has_memory = lambda inputs: inputs.sizes.B == 1 or draw.random() < 0.8
    for one in (made, calm):
        for number in range(3):
            one.engine.add_request(str(number), [1, 2, number], replace(PARAMS, seed=number))
    found, expected = made.drain(), calm.drain()
    assert made.device.num_refused and made.scheduler.num_forced
    assert {key: one.outputs for key, one in found.items()} == {key: one.outputs for key, one in expected.items()}


@pytest.mark.parametrize("options", [{"drafts": 3}, {"lifetimes": {"window_8": 48}}, {"slots": 6}], ids=str)
def test_drafts_windows_and_states(served: Served, options: dict[str, Any]) -> None:
    some = {f"g{n}": ([1, 2, n], replace(PARAMS, seed=n)) for n in range(2)}
    others = {f"p{n}": ([7, n], PLAIN) for n in range(2)}
    made, plain = both(served, {**some, **others}, **options)
    assert made.scheduler.num_forced and made.device.num_launches < plain.device.num_launches


def test_penalties_count_them(served: Served) -> None:
    params = replace(PARAMS, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    made, _ = both(served, {"a": ([1, 2, 3], params), "b": ([4, 5], replace(params, seed=9))})
    assert made.scheduler.num_forced


def test_later_requests_find_their_pages(served: Served, tokenizer: Tokenizer) -> None:
    made, plain = both(served, {"a": ([1, 2, 3], PARAMS)}, page_size=4)
    again = [1, 2, 3, *made.outputs["a"].token_ids]
    cached: list[int] = []
    for one in (made, plain):
        one.engine.add_request("b", again, PLAIN)
        cached.append(one.drain()["b"].num_cached_tokens)
    assert cached[0] == cached[1] >= len(again) - 5


def ends(tokenizer: Tokenizer) -> dict[str, SamplingParams]:
    text = "the cat und die Katze the end"
    tokens, params = tokenizer.encode(text), replace(PARAMS, structured_outputs={"choice": [text]})
    return {
        **{f"at {length}": replace(params, max_tokens=length) for length in range(1, len(tokens) + 3)},
        "stopped": replace(params, stop=["die K"]),
        "stopped with": replace(params, stop=["Katze"], include_stop_str_in_output=True),
        "late stop": replace(params, stop=["the"], min_tokens=10),
        "token": replace(params, stop_token_ids=[tokens[len(tokens) // 2]]),
        "late token": replace(params, stop_token_ids=[tokens[0], tokens[-1]], min_tokens=4),
        "going on": replace(params, ignore_eos=True, max_tokens=len(tokens) + 9),
        "least": replace(params, min_tokens=300),
        "no text": replace(params, detokenize=False),
    }


def test_ends_inside_a_run(served: Served, tokenizer: Tokenizer) -> None:
    for key, params in ends(tokenizer).items():
        made, _ = both(served, {key: (tokenizer.encode("go"), params)})
        one = made.outputs[key]
        if key.startswith("at "):
            assert len(one.token_ids) == min(
                params.max_tokens or 0, len(tokenizer.encode("the cat und die Katze the end")) + 1
            )
        elif key in ("stopped", "stopped with"):
            assert one.stop_reason in params.stop and one.text.endswith("und " if key == "stopped" else "Katze")
    together = {key: (tokenizer.encode("go"), params) for key, params in ends(tokenizer).items()}
    assert both(served, together, max_batch=8)[0].scheduler.num_forced


def test_streamed_outputs_grow_by_whole_runs(served: Served) -> None:
    made = served()
    made.engine.add_request("a", [1, 2], PARAMS)
    sizes, texts = [0], [""]
    while made.engine.has_unfinished():
        for output in made.step():
            sizes.append(len(output.outputs[0].token_ids))
            texts.append(output.outputs[0].text)
    assert max(after - before for before, after in pairwise(sizes)) > 8
    assert all(after.startswith(before) for before, after in pairwise(texts))


def test_log_probabilities_and_other_limits_take_one_by_one(served: Served, tokenizer: Tokenizer) -> None:
    fitting = sorted({*tokenizer.encode("the cat"), *tokenizer.eos_token_ids})
    params = replace(PARAMS, structured_outputs={"choice": ["the cat"]})
    for limited in (
        replace(params, logprobs=2),
        replace(params, allowed_token_ids=fitting),
        replace(params, bad_words=["the dog"]),
    ):
        made, plain = both(served, {"a": ([1, 2], limited)})
        assert not made.scheduler.num_forced and made.device.num_launches == plain.device.num_launches
        assert made.outputs["a"].text == "the cat"
    biased, _ = both(served, {"a": ([1, 2], replace(params, logit_bias={3: -5.0}))})
    assert biased.scheduler.num_forced
    # Its scores are of the prompt alone.
    scored, _ = both(served, {"a": ([1, 2, 3], replace(params, prompt_logprobs=1))})
    assert scored.scheduler.num_forced


def test_a_contradiction_ends_as_without_forced_tokens(served: Served, tokenizer: Tokenizer) -> None:
    params = replace(PARAMS, structured_outputs={"choice": ["日z"]}, bad_words=["z"])
    made, _ = both(served, {"a": ([1], params)})
    assert made.outputs["a"].finish_reason == "error"


def test_short_runs_of_few_sequences_are_not_worth_a_mixed_step(served: Served) -> None:
    grammar = {"regex": "([0-9]dog){6}"}
    other = {f"p{n}": ([7, n], replace(PLAIN, max_tokens=60)) for n in range(15)}
    made, plain = both(served, {**other, "g": ([1], replace(PARAMS, structured_outputs=grammar))}, max_batch=16)
    assert not made.scheduler.num_forced and made.device.num_launches == plain.device.num_launches
    alone, _ = both(served, {"g": ([1], replace(PARAMS, structured_outputs=grammar))}, max_batch=16)
    assert alone.scheduler.num_forced


def test_steps_of_few_tokens_stay_so(served: Served) -> None:
    """With ten sequences, forced tokens fill a step up to 16 tokens; more would have to save five."""
    text = "die Katze und the cat " * 3
    requests = {f"p{n}": ([7, n], replace(PLAIN, max_tokens=50)) for n in range(9)}
    requests["g"] = [1], replace(PARAMS, structured_outputs={"choice": [text]})
    made, _ = both(served, requests, max_batch=10)
    lengths: list[int] = []
    again = served(max_batch=10)
    for key, (prompt, params) in requests.items():
        again.engine.add_request(key, prompt, params)
    launch = again.device.launch
    again.device.launch = lambda inputs: (lengths.append(inputs.sizes.T), launch(inputs))[1]
    again.drain()
    assert made.scheduler.num_forced and 16 in lengths[1:] and max(lengths[1:]) == 16


def test_steps_that_feed_prompts_take_short_runs_too(served: Served) -> None:
    grammar = {"regex": "([0-9]dog){40}"}
    requests = {f"p{n}": ([7, n], replace(PLAIN, max_tokens=60)) for n in range(6)}
    requests["g"] = [1], replace(PARAMS, structured_outputs=grammar)
    requests["long"] = [n % 250 for n in range(400)], PLAIN
    made, _ = both(served, requests, max_batch=8, max_tokens=24)
    assert made.scheduler.num_forced


@pytest.mark.parametrize("step", range(1, 9))
def test_aborted_in_any_step(served: Served, step: int) -> None:
    made = served()
    made.engine.add_request("a", [1, 2], PARAMS)
    made.engine.add_request("b", [1, 3], replace(PARAMS, seed=8))
    for _ in range(step):
        made.step()
    made.engine.abort("a")
    assert made.drain()["b"].outputs[0].finish_reason == "stop"


def test_logits_that_are_not_finite(served: Served) -> None:
    made = served()
    made.device.invalid = lambda context: len(context) >= 4 and context[:2] == [1, 2]
    made.engine.add_request("a", [1, 2], PARAMS)
    made.engine.add_request("b", [1, 3], replace(PARAMS, seed=8))
    found = made.drain()
    assert found["a"].outputs[0].finish_reason == "error" and found["b"].outputs[0].finish_reason == "stop"


def test_a_sampled_token_that_is_not_the_forced_one_is_a_fault(served: Served) -> None:
    made = served()
    made.device._next = lambda context, knobs: 5
    made.engine.add_request("a", [1, 2], PARAMS)
    with pytest.raises(InternalError, match="where the grammar forces"):
        made.drain()
    assert not made.engine.has_unfinished()


def test_forced_tokens_are_those_of_masks_with_one_token(
    grammars: Grammars, sequence: Any, allowed: Any, tokenizer: Tokenizer, draw: random.Random
) -> None:
    kinds = [StructuredOutputsParams(**one) for one in GRAMMARS]
    kinds += [StructuredOutputsParams(json=schema(draw), disable_any_whitespace=bool(n % 2)) for n in range(6)]
    num_forced = 0
    for params in kinds:
        one, ahead = sequence(params), sequence(params)
        for _ in range(60):
            ((some,), ended) = allowed([one])
            ahead.matcher.advance(one.output_ids)
            ahead.matcher.look_ahead(len(one.output_ids), 3, lambda token: True)
            forced = ahead.matcher.forced(len(one.output_ids))
            assert not ended and (not forced or list(some) == [forced[0]]), (params, one.output_ids)
            num_forced += bool(forced)
            one.output_ids.append(int(draw.choice(some)))
            if one.output_ids[-1] in tokenizer.eos_token_ids:
                break
    assert num_forced > 50


def test_masks_of_forced_tokens(sequence: Any, allowed: Any, masks: Any, tokenizer: Tokenizer) -> None:
    from ingot.runtime.scheduling.edited_rows import MaskedRow

    one = sequence(StructuredOutputsParams(choice=["the cat"]))
    spelled: list[int] = []
    for _ in range(20):
        ((some,), ended) = allowed([one])
        assert not ended and len(some) == 1
        masks.look_ahead([MaskedRow(one, 0)], 3)
        one.output_ids.append(int(some[0]))
        spelled.append(int(some[0]))
        if spelled[-1] in tokenizer.eos_token_ids:
            break
    assert tokenizer.decode(spelled) == "the cat"
    one.end = End("stop")
    assert masks.look_ahead([MaskedRow(one, 0)], 3) == []


def test_tokens_that_the_model_does_not_have_are_not_forced(sequence: Any, tokenizer: Tokenizer) -> None:
    one = sequence(StructuredOutputsParams(choice=["the cat"]))
    assert not one.matcher.look_ahead(0, 8, lambda token: False) and not one.matcher.forced(0)
    assert one.matcher.look_ahead(0, 8, lambda token: True)
    assert re.match(re.escape(tokenizer.decode(list(one.matcher.forced(0)))), "the cat")


def test_slow_grammars_are_looked_at_less(sequence: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(f"ingot.runtime.grammar.matcher.time.{name}", lambda: next(clock) * 2 * FAST_SECONDS)
    one = sequence(StructuredOutputsParams(choice=["0123456789"]))
    one.matcher.look_ahead(0, 8, lambda token: True)
    assert len(one.matcher.forced(0)) == 1, "the time is over"
    assert one.matcher.seconds == 0, "a busy machine may be the reason; the next time, only this thread's time counts"
    for _ in range(3):
        one.output_ids += one.matcher.forced(len(one.output_ids))
        one.matcher.look_ahead(len(one.output_ids), 8, lambda token: True)
    assert one.matcher.seconds == pytest.approx(3 * 2 * FAST_SECONDS) and not one.matcher.error


@pytest.mark.one_in(2)
@pytest.mark.parametrize("turn", range(4))
def test_random_work(served: Served, tokenizer: Tokenizer, turn: int) -> None:
    print(f"INGOT_TEST_SEED={run_seed()}")
    draw = random.Random(f"{run_seed()} {turn}")
    text = "the cat und die Katze the end"
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    for place in range(draw.randint(3, 9)):
        temperature = draw.choice([0.0, 1.0])
        params = replace(
            draw.choice([PARAMS, PLAIN]),
            temperature=temperature,
            seed=place,
            max_tokens=draw.choice([7, 40, 160]),
            n=draw.choice([1, 1, 2]) if temperature else 1,
            stop=draw.choice([[], [], ["die"], ['":']]),
            stop_token_ids=draw.choice([[], [], [draw.choice(tokenizer.encode(text))]]),
            min_tokens=draw.choice([0, 0, 5]),
            logprobs=draw.choice([None, None, 1]),
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
            detokenize=True,
        )
        if params.structured_outputs is not None:
            params = replace(params, structured_outputs=draw.choice(GRAMMARS))
        requests[str(place)] = [1, 2, *(draw.randrange(9) for _ in range(draw.randint(1, 30)))], params
    page_size = draw.choice([4, 16])
    options = {
        "max_batch": draw.choice([2, 4, 8]),
        "max_tokens": draw.choice([8, 24, 64]),
        "page_size": page_size,
        "num_pages": draw.choice([260, 1000]) // page_size,
        "max_seq_len": 224,
        "prefix_caching": draw.random() < 0.5,
        **draw.choice([{}, {}, {"drafts": 2}, {"lifetimes": {"window_8": 60}}, {"slots": 10}]),
    }
    both(served, requests, **options)
