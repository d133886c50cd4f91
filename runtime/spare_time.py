"""The time in which the host only waits for a step, and what can be done in it."""

import time
from collections.abc import Callable

# Steps of fewer tokens are over before anything worth while is done.
_FEWEST_TOKENS = 256

# Gets the seconds that there are, and does something that fits in or nothing; tells whether it did.
Work = Callable[[float], bool]


def nothing_to_do(seconds: float) -> bool:
    return False


class SpareTime:
    """Gives `work` the time until the step that runs is expected to end, by what the last long one took for a token.

    Nothing that could be launched waits for it: that depends on the tokens of the step that runs.
    """

    def __init__(self, work: Work, clock: Callable[[], float] = time.perf_counter) -> None:
        self._work, self._clock = work, clock
        self._per_token: float | None = None
        self._began = clock()  # when the step that is waited for began to run

    def begin(self) -> None:
        """A step was launched, and none was running."""
        self._began = self._clock()

    def wait(self, tokens: int) -> None:
        """The host is about to wait for a step of so many tokens, the oldest that is in flight."""
        if self._per_token is not None and tokens >= _FEWEST_TOKENS:
            left = self._per_token * tokens - (self._clock() - self._began)
            if left > 0:
                self._work(left)

    def end(self, tokens: int) -> None:
        """That step has ended, and the one after it begins."""
        now = self._clock()
        if tokens >= _FEWEST_TOKENS:
            self._per_token = (now - self._began) / tokens
        self._began = now
