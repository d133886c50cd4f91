"""Masks: a token is allowed if a new matcher takes it after the same outputs, and no other is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from random_schemas import schema

from ingot.runtime.grammar.compiled import Grammars
from ingot.runtime.grammar.limits import SLOW_SECONDS
from ingot.runtime.grammar.masks import _LEAST_MASKS, _TRY_EVERY, Masks
from ingot.runtime.grammar.params import FAILED, StructuredOutputsParams
from ingot.runtime.params.logit_edits import edits_of
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.edited_rows import MaskedRow
from ingot.runtime.text.tokenizer import Tokenizer

Sequences = Callable[..., Any]
WORD = StructuredOutputsParams(choice=["cat", "cats", "die Katze", "日本語"])


def test_an_allowed_token_is_one_that_a_new_matcher_takes(
    grammars: Grammars, sequence: Sequences, allowed: Sequences, tokenizer: Tokenizer, draw: random.Random
) -> None:
    kinds = [
        StructuredOutputsParams(json=schema(draw)),
        StructuredOutputsParams(json=schema(draw), disable_any_whitespace=True),
        StructuredOutputsParams(regex="([a-c]{2}|été)+[0-9]?"),
        StructuredOutputsParams(grammar='root ::= "(" root ")" | [a-z]+'),
        WORD,
    ]
    many = [sequence(one) for one in kinds]
    for _ in range(6):
        tokens, ended = allowed(many)
        for params, one, some in zip(kinds, many, tokens, strict=True):
            if one.output_ids and one.output_ids[-1] in tokenizer.eos_token_ids:
                continue
            # Where the next bytes are fixed, llguidance allows only the token with which the tokenizer spells them.
            fixed = bool(one.matcher.backend.compute_ff_bytes())
            fresh = grammars.matcher(params)
            assert fresh.consume_tokens(one.output_ids)
            for token in draw.sample(range(tokenizer.vocab_size), 90):
                taken = fresh.deep_copy().consume_token(token)
                assert taken == (token in some) or (taken and fixed), (params, one.output_ids, token)
            one.output_ids.append(int(draw.choice(some)))
        assert not ended


def test_the_limits_of_a_request_narrow_its_mask(sequence: Sequences, allowed: Sequences, tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.eos_token_ids
    params = SamplingParams(allowed_token_ids=[*tokenizer.encode("cat"), eos], bad_words=["s"])
    edits = edits_of(params, tokenizer.vocab_size, tokenizer)
    free, limited = sequence(WORD), sequence(WORD, edits=edits)
    (some, few), _ = allowed([free, limited])
    assert set(few) == set(some) & set(params.allowed_token_ids or ()) and len(few) < len(some)
    # "cats" is not allowed, so after "cat" only the end is left.
    late, early = sequence(WORD), sequence(WORD, min_tokens=40)
    limited.output_ids, late.output_ids, early.output_ids = (tokenizer.encode("cat") for _ in range(3))
    (few, some, before), _ = allowed([limited, late, early])
    assert list(few) == [eos] and eos in some and eos not in before and set(before) == set(some) - {eos}
    early.output_ids = tokenizer.encode("die Katze")
    (only,), _ = allowed([early])
    assert list(only) == [eos], "a complete grammar ends before min_tokens"


def test_what_follows_an_end_token(sequence: Sequences, allowed: Sequences, tokenizer: Tokenizer) -> None:
    going = sequence(WORD, goes_on=True)
    going.output_ids = [*tokenizer.encode("cat"), *tokenizer.eos_token_ids]
    (some,), ended = allowed([going])
    assert len(some) >= tokenizer.vocab_size and not ended
    going.output_ids += tokenizer.encode("any text")
    (some,), ended = allowed([going])
    assert len(some) >= tokenizer.vocab_size and not ended


def test_a_sequence_without_a_next_token_ends(sequence: Sequences, allowed: Sequences, tokenizer: Tokenizer) -> None:
    only = edits_of(SamplingParams(allowed_token_ids=tokenizer.encode("die")), tokenizer.vocab_size, tokenizer)
    stuck, wrong, whole, fine = (sequence(WORD, edits=one) for one in (only, None, only, None))
    stuck.output_ids = tokenizer.encode("die")
    wrong.output_ids = tokenizer.encode("dog")
    whole.output_ids = tokenizer.encode("cat")
    _, ended = allowed([stuck, wrong, whole, fine])
    assert ended.keys() == {0, 1, 2}
    assert ended[0].reason == ended[1].reason == "error" and ended[2] == ("stop", None)
    assert str(ended[0].stop).startswith(FAILED + "no token") and str(ended[1].stop).startswith(FAILED)
    assert "\n" not in str(ended[1].stop)


def test_ended_sequences_are_left_out(sequence: Sequences, masks: Masks) -> None:
    one, other = sequence(WORD), sequence(WORD)
    one.end = "stop"
    rows, ended = masks.fill([MaskedRow(one, 5), MaskedRow(other, 9)])
    assert rows.rows.tolist() == [9] and len(rows.words) == 1 and not ended and not one.matcher.advance([])


class _Slow:
    """A matcher whose masks take long."""

    def __init__(self, backend: Any, clock: list[float]) -> None:
        self._backend, self._clock = backend, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def unsafe_compute_mask_ptr(self, *where: int) -> None:
        self._clock[0] += 0.4
        self._backend.unsafe_compute_mask_ptr(*where)


def test_slow_masks_end_their_sequence_alone(
    sequence: Sequences, allowed: Sequences, masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("ingot.runtime.grammar.masks.time.thread_time", lambda: clock[0])
    monkeypatch.setattr(masks, "_slow", True)  # as after a step whose masks took long together
    one, other = sequence(WORD), sequence(WORD)
    one.matcher.backend = _Slow(one.matcher.backend, clock)
    for number in range(3):
        _, ended = allowed([one, other])
        assert one.matcher.seconds == pytest.approx(0.4 * (number + 1)) and other.matcher.seconds == 0
        assert bool(ended) == (one.matcher.seconds > SLOW_SECONDS)
    assert ended.keys() == {0} and "took 1.2 s" in str(ended[0].stop)
    one.end = ended[0]
    masks.fill([])
    assert not masks._slow, "the next masks are computed in parallel again"


@pytest.fixture
def on_16_cores(grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Masks:
    monkeypatch.setattr("ingot.runtime.grammar.masks.os.sched_getaffinity", lambda _: range(16))
    return Masks(tokenizer.vocab_size, grammars.words, _LEAST_MASKS, pin_memory=False)


def test_any_number_of_threads_computes_the_same_masks(
    on_16_cores: Masks, sequence: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [MaskedRow(sequence(WORD), row) for row in range(_LEAST_MASKS)]
    found = []
    for way in on_16_cores._ways:
        monkeypatch.setattr(on_16_cores, "_way", lambda _, way=way: way)
        found.append(on_16_cores.fill(sequences)[0].words.clone())
    assert len(found) == 3 and all(torch.equal(one, found[0]) for one in found) and bool(found[0].any())


def test_the_fastest_number_of_threads_computes_most_masks(on_16_cores: Masks) -> None:
    ways = on_16_cores._ways
    for seconds in (3e-5, 1e-5, 2e-5):
        way = on_16_cores._way(_LEAST_MASKS)
        assert way.seconds is None, "each is tried first"
        way.took(seconds)
    chosen = [on_16_cores._way(_LEAST_MASKS) for _ in range(3 * _TRY_EVERY)]
    assert chosen.count(ways[1]) >= len(chosen) - 3 and all(way in chosen for way in ways)
    assert on_16_cores._way(_LEAST_MASKS - 1) is ways[0], "few masks are computed by the engine's thread"


def test_a_vocabulary_beyond_the_tokenizers(tokenizer: Tokenizer, sequence: Sequences) -> None:
    """Models have more rows of logits than tokens, or fewer; no mask allows a token that is not there."""
    for vocab in (tokenizer.vocab_size + 100, tokenizer.vocab_size - 40):
        sized = Grammars(tokenizer, vocab, tokenizer.eos_token_ids)
        computed = Masks(vocab, sized.words, 2, pin_memory=False)
        one = sequence(StructuredOutputsParams(regex="(?s:.*)"))
        one.matcher.backend = sized.matcher(StructuredOutputsParams(regex="(?s:.*)"))
        rows, _ = computed.fill([MaskedRow(one, 1)])
        assert rows.words.shape == (1, -(-vocab // 32)) and rows.words.is_contiguous()
        bits = np.unpackbits(rows.words.numpy().view(np.uint8), bitorder="little")
        assert bits[:200].sum() > 100 and not bits[tokenizer.vocab_size + 31 :].any()


def test_a_rollback_takes_outputs_back(
    grammars: Grammars, sequence: Sequences, allowed: Sequences, tokenizer: Tokenizer
) -> None:
    one, other = sequence(WORD), sequence(WORD)
    one.output_ids = tokenizer.encode("die Katze")
    allowed([one])
    kept = one.output_ids[:2]
    one.matcher.rollback(len(one.output_ids) - 2)
    one.output_ids = other.output_ids = kept
    (found, expected), ended = allowed([one, other])
    assert not ended and list(found) == list(expected)


def test_grammars_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    params = StructuredOutputsParams(regex="kept[0-9]")
    assert not grammars.has(params)
    grammars.matcher(params)
    monkeypatch.setattr(Grammars, "prepare", None)
    first, second = grammars.matcher(replace(params)), grammars.matcher(params)
    first.consume_token(0)
    assert first.is_error() and not second.is_error(), "each has its own state"
