"""Deltas on their way to a caller: merged while it is slow, ended by the engine, an error or the caller."""

from __future__ import annotations

import asyncio

import pytest

from ingot.ir.errors import EngineDeadError
from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.engine.messages import Delta
from ingot.serve.engine.wakeups import Wakeups


def delta(index: int, *tokens: int, reason: str | None = None) -> Delta:
    return Delta(
        1,
        index,
        list(tokens),
        "".join(f"{token} " for token in tokens),
        [[(one, -1.0, 1, None)] for one in tokens],
        reason,
    )


def test_deltas_merge_until_they_are_taken() -> None:
    async def run() -> None:
        stream = DeltaStream(2, lambda: None, Wakeups())
        for one in (delta(0, 1), delta(1, 7), delta(0, 2, 3), delta(0, 4, reason="stop")):
            stream.put(one)
        first, second = await anext(stream)
        assert (first.token_ids, first.text, first.finish_reason) == ([1, 2, 3, 4], "1 2 3 4 ", "stop")
        assert first.logprobs is not None and len(first.logprobs) == 4
        assert (second.token_ids, second.finish_reason) == ([7], None) and not stream.ended
        stream.put(delta(1, reason="length"))
        assert [one.finish_reason for one in await anext(stream)] == ["length"] and stream.ended
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(run())


def test_a_waiting_caller_wakes() -> None:
    async def run() -> None:
        stream = DeltaStream(1, lambda: None, Wakeups())
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.put(delta(0, 1))
        assert [one.token_ids for one in await waiting] == [[1]]

    asyncio.run(run())


def test_an_error_comes_after_what_waits() -> None:
    async def run() -> None:
        stream = DeltaStream(1, lambda: None, Wakeups())
        stream.put(delta(0, 1))
        stream.fail(EngineDeadError("gone"))
        assert stream.ended and stream.failed
        assert len(await anext(stream)) == 1
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await anext(stream)

    asyncio.run(run())


def test_closing_leaves_once() -> None:
    async def run() -> None:
        left: list[int] = []
        stream = DeltaStream(1, lambda: left.append(1), Wakeups())
        stream.put(delta(0, 1))
        waiting = [one async for one in _closed_soon(stream)]
        assert waiting == [] and left == [1]
        stream.close()
        assert left == [1]
        ended = DeltaStream(1, lambda: left.append(2), Wakeups())
        ended.put(delta(0, 1, reason="stop"))
        ended.close()
        assert left == [1]

    async def _closed_soon(stream: DeltaStream):
        stream.close()
        async for one in stream:
            yield one

    asyncio.run(run())
