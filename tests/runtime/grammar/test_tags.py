"""Grammars of tagged parts: those of tools, and structural tags in both forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ingot.ir.errors import RequestError
from ingot.runtime.grammar.compiled import Grammars
from ingot.runtime.grammar.lark import Tag, lark_of_tags, lark_of_text_with_tags, whole_pattern
from ingot.runtime.grammar.params import StructuredOutputsParams
from ingot.runtime.text.tokenizer import Tokenizer

Accepts = Callable[[StructuredOutputsParams, str], bool]
CALL = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAGS = [Tag("<f=x>", CALL, "</f>"), Tag("<f=y>", None, "</f>")]


@pytest.fixture(scope="module")
def accepts(grammars: Grammars, tokenizer: Tokenizer) -> Accepts:
    """`accepts(grammar, text)`: whether the text is one of the grammar. Special tokens in it are tokens."""

    def check(params: StructuredOutputsParams, text: str) -> bool:
        matcher, tokens = grammars.matcher(params), tokenizer.backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


def test_tags_in_a_row(accepts: Accepts) -> None:
    grammar = StructuredOutputsParams(grammar=lark_of_tags(TAGS))
    for text in ('<f=x>{"a":1}</f>', '<f=x>{"a":1}</f><f=y>any < / text</f>', "<f=y></f>"):
        assert accepts(grammar, text), text
    for text in ("", '{"a":1}', '<f=x>{"b":1}</f>', "<f=y>any</f>x", '<f=x>{"a":1}</f> <f=y></f>', "text <f=y></f>"):
        assert not accepts(grammar, text), text
    few = StructuredOutputsParams(grammar=lark_of_tags([Tag("", CALL, "")], separator="; ", most=2))
    assert accepts(few, '{"a":1}') and accepts(few, '{"a":1}; {"a":2}')
    assert not accepts(few, '{"a":1}; {"a":2}; {"a":3}') and not accepts(few, '{"a":1}{"a":2}')
    (one,) = [StructuredOutputsParams(grammar=lark_of_tags(TAGS, most=1))]
    assert accepts(one, "<f=y></f>") and not accepts(one, "<f=y></f><f=y></f>")


def test_text_with_tags(accepts: Accepts) -> None:
    grammar = StructuredOutputsParams(grammar=lark_of_text_with_tags(["<f="], TAGS))
    for text in ("", "any text", "a < b <f", 'one <f=x>{"a":1}</f> two <f=y>z</f>', "<f=y></f>"):
        assert accepts(grammar, text), text
    for text in ("a <f=z>", '<f=x>{"b":1}</f>', '<f=x>{"a":1}', "<f=y>open"):
        assert not accepts(grammar, text), text


def test_special_tokens_are_tokens(accepts: Accepts, tokenizer: Tokenizer) -> None:
    assert "<sep>" in tokenizer.special_tokens
    tags = [Tag("<sep>call ", CALL, "<sep>")]
    as_tokens = StructuredOutputsParams(grammar=lark_of_tags(tags, special=tokenizer.special_tokens))
    as_text = StructuredOutputsParams(grammar=lark_of_tags(tags))
    text = '<sep>call {"a":1}<sep>'
    assert accepts(as_tokens, text) and not accepts(as_text, text), "text of a special token is another text"
    anything = StructuredOutputsParams(
        grammar=lark_of_text_with_tags(["<sep>"], tags, special=tokenizer.special_tokens)
    )
    assert accepts(anything, f"before {text} after") and not accepts(anything, "before <sep>other")


def tag(**content: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}


CONST = {"type": "const_string", "value": "k"}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (CONST, ["k"], ["", "kk"]),
    ({"type": "json_schema", "json_schema": CALL}, ['{"a":1}', '{ "a": 1 }'], ["{}"]),
    ({"type": "regex", "pattern": "^[ab]{2}$"}, ["ab"], ["a", "abb"]),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9]'}, ["x1"], ["x"]),
    ({"type": "any_text"}, ["", "any\ntext"], []),
    ({"type": "sequence", "elements": [CONST, CONST]}, ["kk"], ["k"]),
    ({"type": "or", "elements": [CONST, {"type": "const_string", "value": "m"}]}, ["k", "m"], ["km"]),
    (tag(type="any_text"), ["<a></a>", "<a>x</b></a>"], ["<a>x", "x"]),
    (tag(**CONST), ["<a>k</a>"], ["<a></a>"]),
    (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag(**CONST)]},
        ["", "x", "x<a>k</a>y<a>k</a>"],
        ["<ab", "<a>m</a>"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag(**CONST)], "at_least_one": True},
        ["<a>k</a>", "<a>k</a> x"],
        ["", "x<a>k</a>"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag(**CONST)], "stop_after_first": True},
        ["x", "x<a>k</a>"],
        ["x<a>k</a>y"],
    ),
    (
        {"type": "tags_with_separator", "separator": ", ", "tags": [tag(**CONST)], "at_least_one": True},
        ["<a>k</a>", "<a>k</a>, <a>k</a>"],
        ["", "<a>k</a><a>k</a>"],
    ),
    (
        {"type": "tags_with_separator", "separator": "", "tags": [tag(**CONST)], "stop_after_first": True},
        ["", "<a>k</a>"],
        ["x"],
    ),
]


@pytest.mark.parametrize("place", range(len(FORMATS)))
def test_formats_of_structural_tags(place: int, accepts: Accepts) -> None:
    form, right, wrong = FORMATS[place]
    grammar = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


def test_the_older_form(accepts: Accepts) -> None:
    given = {"structures": [{"begin": "<f=x>", "schema": CALL, "end": "</f>"}], "triggers": ["<f="]}
    grammar = StructuredOutputsParams(structural_tag=given)
    assert accepts(grammar, "text") and accepts(grammar, 'a <f=x>{"a":1}</f> b') and not accepts(grammar, "<f=y>")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"format": {"type": "qwen"}}, "format of type 'qwen'"),
        ({"format": 3}, "format of type None"),
        ({"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}}}, "end is None"),
        ({"format": {"type": "or", "elements": []}}, "elements is empty"),
        ({"format": {"type": "triggered_tags", "triggers": ["<b"], "tags": [tag(**CONST)]}}, "no trigger begins"),
        ({"format": {"type": "triggered_tags", "triggers": [], "tags": [tag(**CONST)]}}, "triggers is"),
        ({"structures": [{"begin": "a", "end": ""}], "triggers": ["a"]}, "schema is None"),
        ({"structures": []}, "triggers is None"),
    ],
)
def test_malformed_tags(given: dict[str, Any], message: str, grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        grammars.matcher(StructuredOutputsParams(structural_tag=given))
    assert caught.value.where.startswith("StructuredOutputsParams.structural_tag") and caught.value.expected


def test_anchors_of_whole_expressions() -> None:
    assert [whole_pattern(one) for one in ("^a$", "a", r"a\$", r"a\\$", "^", "$", "")] == [
        *("a", "a", r"a\$", r"a\\"),
        *("", "", ""),
    ]
