"""Conversations cut to their last turns: random ones, against the longest end that fits."""

from __future__ import annotations

import asyncio
import random

from run_seed import again, run_seed

from ingot.runtime.chat.messages import Message
from ingot.runtime.params.prompt import Prompt
from ingot.serve.http.responses_api.truncation import drop_oldest_turns


def length(messages: list[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def test_random_conversations() -> None:
    """A prompt has one token a character here. Few prompts are rendered: the number grows with the logarithm."""
    draw = random.Random(run_seed())
    for _ in range(500):
        head = [{"role": "system", "content": "s" * draw.randint(0, 5)} for _ in range(draw.randint(0, 2))]
        roles = draw.choices(("user", "assistant", "system"), (5, 5, 1), k=draw.randint(1, 60))
        turns = [{"role": role, "content": "x" * draw.randint(0, 9)} for role in roles]
        while turns and turns[0]["role"] == "system":
            head.append(turns.pop(0))
        most, rendered = draw.randint(0, 300), 0

        async def render(messages: list[Message]) -> Prompt:
            nonlocal rendered
            rendered += 1
            return Prompt("", [0] * length(messages))

        kept, prompt = asyncio.run(drop_oldest_turns([*head, *turns], most, render))
        begins = [index for index in range(1, len(turns)) if turns[index]["role"] == "user"]
        ends = [[*head, *turns[begin:]] for begin in [0, *begins]]
        expected = next((end for end in ends if length(end) <= most), ends[-1])
        assert length(kept) == length(expected) == len(prompt.token_ids), again("")
        assert kept in ends and rendered <= 13
