"""How deep a body is nested, measured on its bytes, against a walk through the decoded values."""

from __future__ import annotations

import json
import random
from typing import Any

from run_seed import again, run_seed

from ingot.serve.http import body


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


def test_random_bodies() -> None:
    """Near the limit, with strings that have brackets, quotes and backslashes."""
    draw = random.Random(run_seed())

    def text() -> str:
        return "".join(draw.choice('"\\[]{}a,\n') for _ in range(draw.randint(0, 5)))

    def made(levels: int) -> Any:
        if levels == 0:
            return draw.choice([1, text(), None, [], {}])
        others = [draw.choice([text(), made(min(levels - 1, draw.randint(0, 2)))]) for _ in range(draw.randint(0, 2))]
        inner = made(levels - 1)
        if draw.random() < 0.5:
            return [*others, inner]
        return {text() + "k": inner, **{f"{index}{text()}": one for index, one in enumerate(others)}}

    for _ in range(100):
        value = made(draw.randint(body._MAX_DEPTH - 6, body._MAX_DEPTH + 4))
        content = json.dumps(value, indent=draw.choice([None, 1])).encode()
        assert body._is_deep(content) == (depth(value) > body._MAX_DEPTH), again(content)


def test_many_brackets_are_not_deep() -> None:
    assert not body._is_deep(json.dumps({"messages": [{"content": "[" * 1000}] * 1000}).encode())
