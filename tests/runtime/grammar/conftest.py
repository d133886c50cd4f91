"""The grammars of a small byte-level tokenizer, and what follows one of them by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ingot.runtime.grammar.compiled import Grammars
from ingot.runtime.grammar.masks import Masks
from ingot.runtime.grammar.matcher import Matcher
from ingot.runtime.grammar.params import StructuredOutputsParams
from ingot.runtime.scheduling.edited_rows import MaskedRow
from ingot.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture(scope="session")
def masks(grammars: Grammars, tokenizer: Tokenizer) -> Masks:
    return Masks(tokenizer.vocab_size, grammars.words, 64, pin_memory=False)


@pytest.fixture(scope="session")
def sequence(grammars: Grammars, tokenizer: Tokenizer) -> Callable[..., Any]:
    """Makes what `Masks` reads of a request: `sequence(grammar)`."""

    def make(params: StructuredOutputsParams, *, goes_on: bool = False, **more: Any) -> Any:
        matcher = Matcher(grammars.matcher(params), tokenizer.eos_token_ids, goes_on=goes_on)
        given = SimpleNamespace(min_tokens=more.pop("min_tokens", 0))
        return SimpleNamespace(
            matcher=matcher,
            output_ids=[],
            end=None,
            edits=more.pop("edits", None),
            params=given,
            end_tokens=lambda: tokenizer.eos_token_ids,
        )

    return make


@pytest.fixture(scope="session")
def allowed(masks: Masks) -> Callable[..., tuple[list[np.ndarray], dict[int, Any]]]:
    """`allowed(sequences)`: the ids of the tokens that each may choose, and the ends of those that end, by place."""

    def find(sequences: list[Any]) -> tuple[list[np.ndarray], dict[int, Any]]:
        rows, ended = masks.fill([MaskedRow(one, row) for row, one in enumerate(sequences)])
        bits = np.unpackbits(rows.words.numpy().view(np.uint8), axis=1, bitorder="little")
        assert rows.rows.tolist() == list(range(len(sequences)))
        places = {id(one): place for place, one in enumerate(sequences)}
        return [np.flatnonzero(one) for one in bits], {places[id(one)]: end for one, end in ended}

    return find


@pytest.fixture(scope="session")
def follow(allowed: Callable[..., Any], tokenizer: Tokenizer) -> Callable[..., list[str | None]]:
    """`follow(sequences, most, draw)`: random allowed tokens until each ends; its text, or None after `most` tokens."""

    def run(sequences: list[Any], most: int, draw: random.Random) -> list[str | None]:
        texts: list[str | None] = [None] * len(sequences)
        left = dict(enumerate(sequences))
        for _ in range(most):
            if not left:
                break
            tokens, ended = allowed(list(left.values()))
            for (place, one), some in zip(list(left.items()), tokens, strict=True):
                assert not ended and len(some), ended
                one.output_ids.append(int(draw.choice(some)))
                if one.output_ids[-1] in tokenizer.eos_token_ids:
                    texts[place] = tokenizer.decode(one.output_ids)
                    del left[place]
        return texts

    return run


@pytest.fixture
def draw() -> Iterator[random.Random]:
    from run_seed import run_seed

    return random.Random(run_seed())
