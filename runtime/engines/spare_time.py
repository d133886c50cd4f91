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
    """Uses the time in which the host waits for a step. It calls `work` with the seconds that are left until the step
    is expected to end.

    The expected duration of a step is its number of tokens times the seconds per token of the last long step. Calling
    `work` delays no launch: the next launch needs the tokens of the running step anyway.

    steps    the number of steps that have ended
    waited   the seconds that the host has waited for their ends; it worked the rest of the time
    """

    def __init__(self, work: Work, clock: Callable[[], float] = time.perf_counter) -> None:
        self._work, self._clock = work, clock
        self._per_token: float | None = None
        self._began = clock()  # when the running step began
        self._waits_since = self._began
        self.steps = 0
        self.waited = 0.0

    def begin(self) -> None:
        """Record that a step was launched while no other step was running: it begins now."""
        self._began = self._clock()

    def wait(self, tokens: int) -> None:
        """Call `work` if there is time until the oldest step in flight ends. Call this before the host waits for that
        step. `tokens` is the step's number of tokens."""
        if self._per_token is not None and tokens >= _FEWEST_TOKENS:
            left = self._per_token * tokens - (self._clock() - self._began)
            if left > 0:
                self._work(left)
        self._waits_since = self._clock()

    def end(self, tokens: int) -> None:
        """Record that a step of `tokens` tokens has ended. The next step in flight begins now."""
        now = self._clock()
        self.steps += 1
        self.waited += now - self._waits_since
        if tokens >= _FEWEST_TOKENS:
            self._per_token = (now - self._began) / tokens
        self._began = now
