"""Random bodies of requests, mostly valid."""

from __future__ import annotations

import random
from typing import Any

import msgspec

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 20, 21, 128, 129, 259, 260, 4097, 2**31, 2**63, 2**64, 10**30),
    *(0.0, 0.5, 1.0, -0.5, 1e-9, 2.0, 1e308, -1e308),
    *("", "a", "abc", "é🙂", "<end>", "x" * 3000, "tiny", "none", "text"),
    *([], [1], [1, 2, 3], ["a"], ["a", "b"], [[1, 2], [3]], [None], [[]], ["", "a"], [-1], [10**20]),
    *({}, {"a": 1}, {"type": "text"}, {"1": 1.0}, {"include_usage": True}, {"content": "a"}),
    *([{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": "assistant", "content": "a"}], [{}]),
)


def body(fields: type[msgspec.Struct], draw: random.Random) -> dict[str, Any]:
    """A request that is mostly valid, with a few fields of any value."""
    names = fields.__struct_fields__
    made: dict[str, Any] = {"max_output_tokens" if "max_output_tokens" in names else "max_tokens": draw.randint(1, 4)}
    if "input" in names:
        made["input"] = "hello"
    elif "query" in names:
        made |= {"query": "hello", "documents": ["go", "on"]}
    elif "queries" in names:
        made |= {"queries": "hello", "documents": ["go", "on"]}
    elif "prompt" in names:
        made["prompt"] = "hello"
    elif "tokens" in names:
        made["tokens"] = [1, 2]
    elif "messages" in names:
        made["messages"] = [{"role": "user", "content": "hi"}]
    for name in draw.sample(names, draw.randint(0, min(4, len(names)))):
        made[name] = draw.choice(VALUES)
    return made
