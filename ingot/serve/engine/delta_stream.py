"""The deltas of one request on their way to the caller. Deltas that the caller has not taken yet are merged."""

import asyncio
from collections.abc import Callable

from ingot.serve.engine.messages import Delta
from ingot.serve.engine.wakeups import Wakeups


class DeltaStream:
    """An iterator over the deltas of a request, fed by the client of the engine.

    A caller that is slower than the engine gets fewer and larger deltas: at most one for each sequence waits here, so
    a request never holds more than its output. It raises the error that ended the request early.

    num_sequences   the n of the request
    on_leave        called once if the caller closes the stream before all sequences have ended
    wakeups         the queue of all waiting callers. The first deltas, errors and the caller's own closing pass it by.
    engine          the number of the engine that serves the request
    begun           whether a delta has come
    """

    def __init__(self, num_sequences: int, on_leave: Callable[[], None], wakeups: Wakeups, engine: int = 0) -> None:
        self._waiting: dict[int, Delta] = {}
        self._open = set(range(num_sequences))
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._on_leave = on_leave
        self._wakeups = wakeups
        self.engine = engine
        self.begun = False

    @property
    def ended(self) -> bool:
        """Return whether the engine will send no more: all sequences have ended, or an error has ended the request."""
        return not self._open or self._error is not None

    @property
    def failed(self) -> bool:
        """Return whether an error ended the request."""
        return self._error is not None

    def put(self, delta: Delta) -> None:
        """Add a delta of the engine."""
        before = self._waiting.get(delta.index)
        if before is None:
            self._waiting[delta.index] = delta
        else:
            _merge(before, delta)
        if delta.finish_reason is not None:
            self._open.discard(delta.index)
        if not self.begun:
            self.begun = True
            self._wake()
        elif self._reader is not None:
            reader, self._reader = self._reader, None
            self._wakeups.add(reader)

    def move(self, on_leave: Callable[[], None], engine: int) -> None:
        """Let another engine serve the request, which has not begun."""
        self._on_leave, self.engine = on_leave, engine

    def fail(self, error: Exception) -> None:
        """End the request with an error, which the caller gets after the deltas that wait."""
        if not self.ended:
            self._error = error
            self._wake()

    def close(self) -> None:
        """End the request from the caller's side. The engine aborts it, unless it has ended."""
        if not self.ended:
            self._open.clear()
            self._waiting.clear()
            self._on_leave()
            self._wake()

    def __aiter__(self) -> "DeltaStream":
        return self

    async def __anext__(self) -> list[Delta]:
        """Return what is new: at most one delta for each sequence. Only one task may wait at a time."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            reader = self._reader = asyncio.get_running_loop().create_future()
            await reader
        deltas = list(self._waiting.values())
        self._waiting = {}
        return deltas

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


def _merge(into: Delta, new: Delta) -> None:
    """Append a delta to an earlier one of the same sequence."""
    into.token_ids += new.token_ids
    into.text += new.text
    if new.logprobs is not None:
        into.logprobs = (into.logprobs or []) + new.logprobs
    if new.prompt_logprobs is not None:
        into.prompt_logprobs = (into.prompt_logprobs or []) + new.prompt_logprobs
    into.finish_reason, into.stop_reason, into.num_cached = new.finish_reason, new.stop_reason, new.num_cached
