"""The process that checks grammars: crashes and time limits end one grammar, and the next is checked."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from ingot.ir.errors import InternalError, RequestError
from ingot.runtime.grammar.check import GrammarCheck
from ingot.runtime.grammar.compiling import readable
from ingot.runtime.grammar.params import MAX_CHARACTERS, StructuredOutputsParams
from ingot.runtime.text.tokenizer import Tokenizer

GOOD = StructuredOutputsParams(regex="[a-z]+")


def made(tokenizer: Tokenizer, **options: Any) -> GrammarCheck:
    return GrammarCheck(tokenizer.backend.to_str(), tokenizer.vocab_size, [], tokenizer.special_tokens, **options)


def test_a_crash_ends_one_grammar(tokenizer: Tokenizer) -> None:
    check = made(tokenizer)
    length = 15_000
    chain = "\n".join(["start: r0", *(f"r{one}: r{one + 1}" for one in range(length)), f'r{length}: "a"'])
    assert json.loads(check.source(GOOD))["grammars"]
    before = check._process
    with pytest.raises(RequestError, match="too complex"):
        check.source(StructuredOutputsParams(grammar=chain))
    assert check._process is None, "its process has ended"
    assert check.source(GOOD) and check._process is not before


def test_a_slow_grammar_is_given_up(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    check = made(tokenizer)
    check.source(GOOD)
    check._seconds = 1e-6
    with pytest.raises(RequestError, match="took longer than 1e-06 s"):
        check.source(GOOD)
    monkeypatch.setattr(check, "_seconds", 5.0)
    assert check.source(GOOD)


def test_a_process_that_does_not_start(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="did not start, status 1"):
        made(tokenizer).source(GOOD)


def test_a_tokenizer_that_is_not_supported(tokenizer: Tokenizer) -> None:
    check = GrammarCheck("{}", tokenizer.vocab_size, [], {})
    with pytest.raises(RequestError, match="do not support this model's tokenizer"):
        check.source(GOOD)


def test_messages_are_one_line() -> None:
    assert readable("NoExtensionBias\n<non-verbose/>") == "no text matches it, or none from here on"
    assert readable("at 2(8): bad\n   1 | start: x\n        ^\nmore <state>\nTokens: secret") == "bad ^ more"
    assert len(readable("x" * 10_000)) == 400


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "no grammar is set"),
    ({"json": {}, "regex": "a"}, "json and regex are set together"),
    ({"json": "{"}, "json is no JSON"),
    ({"json": "[" * 100_000}, "json is no JSON"),
    ({"json": "3"}, "json is of type int"),
    ({"json": {"a": {1, 2}}}, "cannot be written"),
    ({"json": {"a": float("nan")}}, "cannot be written"),
    ({"json": {"a": "\ud800"}}, "no valid Unicode"),
    ({"regex": 3}, "regex is of type int"),
    ({"regex": "x" * (MAX_CHARACTERS + 1)}, "characters"),
    ({"choice": []}, "choice is"),
    ({"choice": ["a", ""]}, "choice is"),
    ({"choice": "ab"}, "choice is"),
    ({"json_object": 1}, "json_object is"),
    ({"json_object": False}, "no grammar is set"),
    ({"structural_tag": True}, "structural_tag is of type bool"),
    ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.where.startswith("StructuredOutputsParams") and len(str(caught.value)) < 1000


def test_equal_grammars_are_equal() -> None:
    one = StructuredOutputsParams(json={"type": "object", "properties": {"b": {}, "a": {}}})
    text = '{"type": "object",\n "properties": {"b": {}, "a": {}}}'
    assert one == StructuredOutputsParams(json=text) and hash(one) == hash(StructuredOutputsParams(json=text))
    assert one != StructuredOutputsParams(json={"type": "object", "properties": {"a": {}, "b": {}}}), "the order counts"
    assert StructuredOutputsParams(choice=["a", "b", "a"]).choice == ("a", "b")
