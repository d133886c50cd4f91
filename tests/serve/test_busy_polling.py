"""The event loop does not sleep while requests run, and sleeps again after them."""

from __future__ import annotations

import asyncio
import os
import selectors
from typing import Any

import pytest

from ingot.serve.http.busy_polling import BusyPolling


class _Sleeps(selectors.DefaultSelector):
    """A selector that counts how often the event loop looks at its sockets, and how often it may sleep there."""

    looks = sleeps = 0

    def select(self, timeout: float | None = None) -> Any:
        self.looks += 1
        self.sleeps += timeout is None or timeout > 0
        return super().select(timeout)


def _sleeps(mode: Any, running: list[int]) -> tuple[int, int]:
    """Return the looks and sleeps of an event loop while requests run for 20 ms, as (with requests, after them)."""
    selector = _Sleeps()

    async def run() -> tuple[int, int]:
        polling = BusyPolling(mode, lambda: running[0])
        polling.begin()
        polling.begin()  # a second request does not poll twice
        for _ in range(4):
            await asyncio.sleep(0.005)
        before = selector.sleeps
        running[0] = 0
        for _ in range(4):
            await asyncio.sleep(0.005)
        return before, selector.sleeps - before

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return runner.run(run())


def test_it_polls_only_while_requests_run() -> None:
    with_requests, after = _sleeps("on", [2])
    assert with_requests <= 1 and after >= 3


def test_it_sleeps_when_it_is_off() -> None:
    with_requests, after = _sleeps("off", [2])
    assert with_requests >= 3 and after >= 3


@pytest.mark.parametrize(("cores", "polls"), [(2, False), (7, False), (8, True), (64, True)])
def test_it_polls_by_itself_where_cores_are_left(cores: int, polls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with_requests, _ = _sleeps("auto", [1])
    assert (with_requests <= 1) == polls


def test_a_later_request_polls_again() -> None:
    async def run() -> int:
        running, turns = [1], 0

        def count() -> int:
            nonlocal turns
            turns += 1
            return running[0]

        polling = BusyPolling("on", count)
        polling.begin()
        running[0] = 0
        await asyncio.sleep(0.005)
        ended = turns
        running[0] = 1
        polling.begin()
        async with asyncio.timeout(10):
            while turns <= ended + 2:
                await asyncio.sleep(0.005)
        running[0] = 0
        await asyncio.sleep(0.005)
        ended = turns
        await asyncio.sleep(0.005)
        return turns - ended

    assert asyncio.run(run()) == 0
