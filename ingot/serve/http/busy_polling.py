"""Keep the server's event loop awake while requests run, so that their tokens do not wait for a process to wake up."""

import asyncio
import os
from collections.abc import Callable
from typing import Literal

BusyPoll = Literal["auto", "on", "off"]
# A polling server uses one core and each engine another. A machine with so many cores has enough for everything else.
_LEAST_CORES = 8


class BusyPolling:
    """Polls the sockets of the event loop while requests run, instead of sleeping until one is readable.

    A process that sleeps takes time to wake up, and its sender pays for the wakeup. A streamed token passes the server
    once, a request twice. Polling uses one core fully.

    mode      "auto" polls if the process may use at least 8 cores
    running   returns how many requests run
    """

    def __init__(self, mode: BusyPoll, running: Callable[[], int]) -> None:
        self._enabled = mode == "on" or (mode == "auto" and len(os.sched_getaffinity(0)) >= _LEAST_CORES)
        self._running = running
        self._polls = False

    def begin(self) -> None:
        """Poll until no request runs. Call it in the event loop, when a request has been sent to the engine."""
        if self._enabled and not self._polls:
            self._polls = True
            self._turn()

    def _turn(self) -> None:
        # An event loop with a callback to run does not wait for sockets.
        self._polls = self._running() > 0
        if self._polls:
            asyncio.get_running_loop().call_soon(self._turn)
