"""How requests go through Ray, without Ray: the hashes of prompts, and the parts of answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from ingot.serve.ray.forwarded_request import BLOCK_BYTES, ForwardedRequest, Headers, prompt_hashes
from ingot.serve.ray.model_replica import AnswerStart, answer_parts

KEY: Headers = ((b"Authorization", b"Bearer one"),)
TURNS = [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b" * 100}]


def hashes(headers: Headers = (), **fields: Any) -> tuple[bytes, ...]:
    return prompt_hashes(json.dumps(fields).encode(), headers)


@pytest.mark.parametrize("field", ["prompt", "messages", "input"])
def test_a_longer_prompt_begins_with_the_hashes_of_the_shorter(field: str) -> None:
    short = "a" * 300 if field != "messages" else TURNS
    longer = short + ("b" * 300 if field != "messages" else [{"role": "user", "content": "c" * 300}])  # type: ignore[operator]
    first, second = hashes(**{field: short}), hashes(**{field: longer}, max_tokens=3)
    whole = len(json.dumps(short)[:-1]) // BLOCK_BYTES
    assert first[:whole] == second[:whole] and len(second) > len(first) > 2


def test_what_separates_prompts() -> None:
    plain = hashes(prompt="a" * 200)
    assert plain == hashes(prompt="a" * 200, temperature=0)
    others = [
        hashes(KEY, prompt="a" * 200),
        hashes(((b"x-api-key", b"one"),), prompt="a" * 200),
        hashes(prompt="a" * 200, cache_salt="s"),
        hashes(prompt="a" * 200, tools=[1]),
        hashes(messages=[{"role": "system", "content": "a" * 200}]),
    ]
    assert all(plain[0] not in one for one in others)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"model": "pico"}', b"\xff"])
def test_a_body_without_a_prompt_has_no_hashes(body: bytes) -> None:
    assert prompt_hashes(body, ()) == ()


def request(**fields: Any) -> ForwardedRequest:
    given = {"method": "POST", "path": "/v1", "root_path": "", "query": b"", "headers": (), "body": b"in", "hashes": ()}
    return ForwardedRequest(**{**given, **fields})


async def echo(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
    for piece in (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


def test_an_answer_has_a_start_and_a_body() -> None:
    async def run() -> None:
        start, *pieces = [part async for part in answer_parts(echo, request(query=b"?"))]
        assert start == AnswerStart(201, [(b"a", b"b")])
        assert pieces == [b"POST/v1?in"], "pieces that wait are joined"

    asyncio.run(run())


def test_a_caller_that_leaves_ends_the_request() -> None:
    async def run() -> None:
        ended = asyncio.Event()

        async def endless(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        parts = answer_parts(endless, request())
        await anext(parts)
        await parts.aclose()
        await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(run())


def test_an_error_of_the_application_is_raised() -> None:
    async def fails(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        raise LookupError("at fault")

    async def run() -> None:
        with pytest.raises(LookupError, match="at fault"):
            async for _ in answer_parts(fails, request()):
                pass

    asyncio.run(run())
