"""Random messages of a model: content, reasoning and tool calls."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

# Pieces of text that are hard for a parser: quotes, escapes, brackets, and begins of markers.
_PIECES = (
    *('"', "'", "\\", "\\n", "\n", "\n\n", "\t", " ", "{", "}", "[", "]", "(", ")", "<", ">", "</", ",", ":", "=", "`"),
    *(
        "<tool",
        "<tool_",
        "</tool_cal",
        "<|",
        "|>",
        "<｜",
        "<thin",
        "</thin",
        "[TOOL",
        "``",
        "func",
        "null",
        "\\u00",
        "é",
    ),
    *("漢字", "🙂", "a", "b", "word", "1", "-", ".", ";", "&", "#", "\x01", "\u2028", '{"name": ', "name", "x=1"),
)
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True)
class Message:
    """One message. `calls` has the name and the arguments of each call."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def random_text(draw: random.Random, most: int = 8) -> str:
    return "".join(draw.choice(_PIECES) for _ in range(draw.randint(0, most)))


def random_value(draw: random.Random, depth: int = 2) -> Any:
    kinds = 8 if depth else 6
    match draw.randrange(kinds):
        case 0:
            return draw.choice([True, False, None])
        case 1:
            return draw.choice([0, -1, 12, draw.randrange(10**12)])
        case 2:
            return draw.choice([0.5, -2.25, 1e-7, 1e22, draw.random()])
        case 6:
            return [random_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
        case 7:
            return {random_name(draw): random_value(draw, depth - 1) for _ in range(draw.randint(0, 3))}
        case _:
            return random_text(draw)


def random_name(draw: random.Random) -> str:
    return draw.choice("abcxyz_") + "".join(draw.choice("abc_09") for _ in range(draw.randint(0, 6)))


def random_message(draw: random.Random) -> Message:
    """A message. Its texts neither begin nor end with white space, because formats write white space around them."""
    calls = [
        (random_name(draw), {random_name(draw): random_value(draw) for _ in range(draw.randint(0, 3))})
        for _ in range(draw.choice((0, 1, 1, 2, 3)))
    ]
    return Message(random_text(draw).strip(), random_text(draw).strip(), _of_one_type(calls))


def _of_one_type(calls: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The calls without arguments that an earlier call of the tool has in another type: a schema has one type."""
    types: dict[tuple[str, str], type] = {}
    return [
        (
            name,
            {key: value for key, value in given.items() if types.setdefault((name, key), type(value)) is type(value)},
        )
        for name, given in calls
    ]


def tools_of(message: Message) -> dict[str, dict[str, Any]]:
    """Tools whose schemas fit the calls of a message. Calls of one tool have arguments of the same types."""
    tools: dict[str, dict[str, Any]] = {}
    for name, arguments in message.calls:
        parameters = tools.setdefault(name, {"name": name, "parameters": {"type": "object", "properties": {}}})
        properties = parameters["parameters"]["properties"]
        for key, value in arguments.items():
            properties[key] = {"type": _TYPES.get(type(value), "null")}
    return tools
