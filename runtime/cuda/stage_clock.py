"""How long the GPU of a pipeline stage computes, apart from its waits for other stages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.runtime.cuda.graphs.staging import move


@dataclass(frozen=True)
class TimedPart:
    """A part of a step between two events on the GPU."""

    begin: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def nanoseconds(self) -> int:
        """Return how long it took. Both events must be complete."""
        return round(float(self.begin.elapsed_time(self.end)) * 1e6)  # of milliseconds


class StageClock:
    """Adds up the time in which the GPU computes parts of steps. `device` is the GPU.

    Parts end before a stage sends and begin after it has received. A CUDA graph records the events of its parts at each
    replay. Their times are read before the next replay, so the sum is late by the last steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, device=device)
        self._launched: deque[TimedPart] = deque()
        self._captured: list[TimedPart] = []
        self._sum = 0

    def begin(self) -> TimedPart:
        """Begin a part on the current stream."""
        # Inside a capture, an external event becomes a node that records it at each replay.
        captured = torch.cuda.is_current_stream_capturing()
        part = TimedPart(*(torch.cuda.Event(enable_timing=True, external=captured) for _ in range(2)))
        part.begin.record()
        # The next kernel may be launched as dependent on the kernel before it; an event is none. This changes nothing.
        move(self._word, self._word)
        (self._captured if captured else self._launched).append(part)
        return part

    def end(self, part: TimedPart) -> None:
        """End a part on the current stream."""
        part.end.record()

    def captured(self) -> Callable[[], None]:
        """Return a function that adds the parts captured since the last call. Call it when a replay is complete."""
        parts, self._captured = self._captured, []

        def complete() -> None:
            self._sum += sum(part.nanoseconds for part in parts)

        return complete

    @property
    def busy(self) -> int:
        """The nanoseconds that the GPU has computed in complete parts."""
        while self._launched and self._launched[0].end.query():
            self._sum += self._launched.popleft().nanoseconds
        return self._sum
