"""Random grammars of requests: right ones, damaged ones, and ones that are made to take long."""

from __future__ import annotations

import json
import random
from typing import Any

from random_schemas import schema

_KEYWORDS: dict[str, Any] = {
    "not": {},
    "uniqueItems": True,
    "oneOf": [{"type": "string"}, {"type": "integer"}],
    "allOf": [{"type": "object"}, {"minProperties": 2}],
    "$ref": "#/$defs/none",
    "if": {"type": "string"},
    "multipleOf": 0.1,
    "pattern": "(?=a)b",
    "format": "phone",
    "minItems": 10**9,
    "maxLength": 10**12,
    "minimum": 10**40,
    "properties": [],
    "required": "a",
    "type": ["string", "nothing"],
    "enum": [],
    "items": False,
    "x-guidance": {"whitespace_pattern": "("},
}


def _damaged(draw: random.Random) -> Any:
    """A schema with one more keyword somewhere, which may contradict the others or be no keyword."""
    some = schema(draw)
    inner = some
    while draw.random() < 0.6:
        nested = [one for one in inner.get("properties", {}).values() if isinstance(one, dict)]
        nested += [one for one in (inner.get("items"), *inner.get("anyOf", ())) if isinstance(one, dict)]
        if not nested:
            break
        inner = draw.choice(nested)
    name = draw.choice([*_KEYWORDS])
    inner[name] = _KEYWORDS[name]
    return some


def _bomb(draw: random.Random) -> Any:
    size = draw.choice([3, 12, 60, 500, 5000])
    match draw.randrange(5):
        case 0:  # doubles with each level
            some: Any = {"type": "integer"}
            for _ in range(min(size, 40)):
                some = {"anyOf": [{"type": "array", "items": some}, {"type": "object", "properties": {"x": some}}]}
                if len(str(some)) > 100_000:
                    break
            return some
        case 1:  # a chain of references
            chain = {f"a{place}": {"$ref": f"#/$defs/a{place + 1}"} for place in range(size)}
            return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{size}": {"type": "integer"}}}
        case 2:
            return {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(size)}}
        case 3:
            return {"allOf": [{"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(4)]} for i in range(9)]}
        case _:
            return {"enum": [{"a": place, "b": [place]} for place in range(size)]}


def regex(draw: random.Random, depth: int = 3) -> str:
    """Return a regular expression; most are valid."""
    kinds = ["a", "é", "[a-f]", r"\d", ".", "(?s:.)", "[^x]", r"\w", "^", "$", "(?i)b", r"\b"]
    if depth == 0:
        return draw.choice(kinds[:8] if draw.random() < 0.95 else kinds)
    inner = [regex(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    match draw.randrange(4):
        case 0:
            return "(" + "|".join(inner) + ")"
        case 1:
            counts = draw.choice(["*", "+", "?", "{2}", "{0,3}", "{1,40}", "{1000}", "{,}"])
            return f"({''.join(inner)}){counts}"
        case 2 if draw.random() < 0.1:
            return "(" + "".join(inner)
        case _:
            return "".join(inner)


def grammar(draw: random.Random) -> str:
    """Return a grammar of Lark or GBNF; most are valid, and some never end."""
    names = ["start", "a", "b", "C"]
    rules = []
    for name in names:
        parts = []
        for _ in range(draw.randint(1, 3)):
            some = ['"x"', '"yz"', "/[0-9]+/", *(names if name.islower() else []), "a?", '"q"{2,5}', "(a | b)", '""']
            parts.append(" ".join(draw.choice(some) for _ in range(draw.randint(1, 3))))
        rules.append(f"{name}: {' | '.join(parts)}")
    text = "\n".join(rules)
    if draw.random() < 0.3:
        text = text.replace("start:", "root:").replace(":", " ::=").replace("/", "")
    if draw.random() < 0.2:
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(["(", '"', "|", "\0", "é", "%"]) + text[place:]
    if draw.random() < 0.1:
        length = draw.choice([100, 15_000])
        text = "\n".join([f"start: r{length}", 'r0: "a"', *(f"r{one + 1}: r{one}" for one in range(length))])
    return text


def grammar_fields(draw: random.Random) -> dict[str, Any]:
    """Return the fields of a random StructuredOutputsParams."""
    match draw.randrange(8):
        case 0 | 1:
            return {"json": schema(draw), "disable_any_whitespace": draw.random() < 0.5}
        case 2:
            return {"json": _damaged(draw), "disable_additional_properties": draw.random() < 0.5}
        case 3:
            return {"json": _bomb(draw)}
        case 4:
            return {"regex": regex(draw)}
        case 5:
            return {"grammar": grammar(draw)}
        case 6:
            return {
                "choice": [
                    "".join(draw.choices("ab é\n\"\\'", k=draw.randint(1, 9))) for _ in range(draw.randint(1, 9))
                ]
            }
        case _:
            content = draw.choice(
                [
                    {"type": "json_schema", "json_schema": schema(draw)},
                    {"type": "any_text"},
                    {"type": "regex", "pattern": regex(draw, 1)},
                    {"type": "other"},
                ]
            )
            tag = {"type": "tag", "begin": draw.choice(["<a>", "<a", "", "b"]), "content": content, "end": "</a>"}
            outer = draw.choice(
                [
                    tag,
                    {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag], "at_least_one": draw.random() < 0.5},
                    {"type": "tags_with_separator", "separator": ",", "tags": [tag]},
                    {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, tag]},
                ]
            )
            return {"structural_tag": json.dumps({"type": "structural_tag", "format": outer})}


def function_schema(draw: random.Random) -> dict[str, Any]:
    """Return the schema of a function's arguments; some are damaged, or take long."""
    kind = draw.random()
    some = schema(draw) if kind < 0.7 else _damaged(draw) if kind < 0.95 else _bomb(draw)
    if isinstance(some, dict) and some.get("type") == "object":
        return some
    definitions = some.get("$defs", {}) if isinstance(some, dict) else {}
    return {"type": "object", "properties": {"a": some}, "required": ["a"], "$defs": definitions}
