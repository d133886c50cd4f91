"""Preparation of later steps in the time in which the host waits for a step."""

import time
from collections.abc import Callable

# Steps of fewer tokens are too short for useful work.
_FEWEST_TOKENS = 256

# Takes the available seconds, does work that fits into them or none, and returns whether it did.
Work = Callable[[float], bool]


def nothing_to_do(seconds: float) -> bool:
    return False


class SpareTime:
    """Calls `work` while the host waits for a step, with the seconds until the step is expected to end. The expectation
    is the time per token of the last long step.

    This delays no launch, because the next launch needs the tokens of the running step.
    """

    def __init__(self, work: Work, clock: Callable[[], float] = time.perf_counter) -> None:
        self._work, self._clock = work, clock
        self._per_token: float | None = None
        self._began = clock()  # when the running step began

    def begin(self) -> None:
        """Record that a step was launched while none was running."""
        self._began = self._clock()

    def wait(self, tokens: int) -> None:
        """Do work before the host waits for the oldest step in flight. `tokens` is the number of its tokens."""
        if self._per_token is not None and tokens >= _FEWEST_TOKENS:
            left = self._per_token * tokens - (self._clock() - self._began)
            if left > 0:
                self._work(left)

    def end(self, tokens: int) -> None:
        """Record that the step of `tokens` tokens has ended, and that the next one begins."""
        now = self._clock()
        if tokens >= _FEWEST_TOKENS:
            self._per_token = (now - self._began) / tokens
        self._began = now
