"""The clocks with which a rank records calls: that of the host, or the events of a GPU, in nanoseconds of the host."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

# In which a GPU waits at the begin of a step, for each call, so that few calls wait for their launch. A call takes 7 us
# of the host and each of its kernels 6 us (ir/machine/gpu_times.py), so this is the time of a call of seven kernels.
# Cycles at 2 GHz, above the clock of an H200.
_WAITED_CYCLES = 100_000

# Returns the nanoseconds of a stamp on the monotonic clock of the host.
Reader = Callable[[Any], int]


class CallClock(Protocol):
    """Stamps the begins and ends of calls."""

    def begin(self) -> Reader:
        """Begin a step. The result reads the stamps of this step, after `end`."""
        ...

    def now(self) -> Any:
        """Return a stamp of the present."""
        ...

    def end(self) -> None:
        """Wait until all stamps can be read."""
        ...


class HostClock(CallClock):
    """The clock of a CPU. All processes of a host have the same one."""

    def begin(self) -> Reader:
        return int

    def now(self) -> int:
        return time.monotonic_ns()

    def end(self) -> None:
        return


class GpuClock(CallClock):
    """Stamps are CUDA events on the current stream.

    stream   the stream of the steps
    calls    the most calls of a step
    """

    def __init__(self, stream: torch.cuda.Stream, calls: int) -> None:
        self._stream, self._calls = stream, calls

    def begin(self) -> Reader:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            first = self.now()
            first.synchronize()
            host = time.monotonic_ns()  # later than the event by a synchronization, some microseconds
            torch.cuda._sleep(_WAITED_CYCLES * self._calls)
        return lambda stamp: host + round(float(first.elapsed_time(stamp)) * 1e6)  # of milliseconds

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self) -> None:
        torch.cuda.synchronize()
