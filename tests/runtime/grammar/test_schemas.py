"""Random JSON schemas: random allowed tokens are a value of the schema when they end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from random_schemas import schema
from run_seed import run_seed

from ingot.ir.errors import RequestError
from ingot.runtime.grammar.params import StructuredOutputsParams


def check(count: int, draw: random.Random, sequence: Callable[..., Any], follow: Callable[..., Any]) -> None:
    """Follow so many random schemas. Most end, and each that does is valid."""
    schemas: list[dict[str, Any]] = []
    sequences: list[Any] = []
    while len(schemas) < count:
        one = schema(draw)
        try:
            sequences.append(sequence(StructuredOutputsParams(json=one, disable_any_whitespace=draw.random() < 0.5)))
        except RequestError as error:  # such as a pattern that no string of the length matches
            assert "the grammar is refused" in error.what, one
            continue
        schemas.append(one)
    ended = 0
    for begin in range(0, count, 50):
        texts = follow(sequences[begin : begin + 50], 300, draw)
        for one, text in zip(schemas[begin : begin + 50], texts, strict=True):
            if text is not None:
                problems = list(Draft202012Validator(one).iter_errors(json.loads(text)))
                assert not problems, (one, text, problems)
                ended += 1
    assert ended > 0.8 * count


def test_outputs_are_values_of_their_schemas(draw: random.Random, sequence: Any, follow: Any) -> None:
    check(300, draw, sequence, follow)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_outputs_of_many_schemas(part: int, sequence: Any, follow: Any) -> None:
    check(300, random.Random(f"{run_seed()} {part}"), sequence, follow)
