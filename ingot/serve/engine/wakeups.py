"""Wake callers that have waiting deltas: few in each pass of the event loop, so that the loop stays responsive."""

import asyncio
from collections import deque

# Writing an event takes a server some 30 µs, most of it in the system call. A new request passes the loop some five
# times before the engine has it, so it waits about a millisecond on a server that does nothing but write.
_PER_PASS = 8


class Wakeups:
    """A queue of futures. Deltas merge while their caller is in it, so an overloaded server writes fewer events."""

    def __init__(self) -> None:
        self._queue: deque[asyncio.Future[None]] = deque()

    def add(self, reader: "asyncio.Future[None]") -> None:
        """Wake a caller after those that were added before."""
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._wake_some)
        self._queue.append(reader)

    def _wake_some(self) -> None:
        for _ in range(min(_PER_PASS, len(self._queue))):
            reader = self._queue.popleft()
            if not reader.done():
                reader.set_result(None)
        if self._queue:
            asyncio.get_running_loop().call_soon(self._wake_some)
