"""Find the knee of a server: the highest arrival rate at which nearly all requests meet limits of latency."""

import time
from collections.abc import Callable
from dataclasses import dataclass

SHARE = 0.99  # of the requests must meet the limits, as in MLPerf Inference, which limits the 99th percentile


@dataclass(frozen=True)
class Probe:
    """A load at `rate` requests per second. The share `good` of its requests met the limits.

    `ended_early` is True if the load was stopped once too many had failed; `good` is then the most that was possible.
    """

    rate: float
    good: float
    ended_early: bool = False

    @property
    def passed(self) -> bool:
        return self.good >= SHARE


@dataclass(frozen=True)
class Knee:
    """The probes of a search, in their order. `complete` is False if the time ended before the aimed precision."""

    probes: tuple[Probe, ...]
    complete: bool

    @property
    def rate(self) -> float:
        """Return the highest rate that passed below all rates that failed; 0 if there is none."""
        return max((one.rate for one in self.probes if one.passed and one.rate < self.failed), default=0.0)

    @property
    def failed(self) -> float:
        """Return the lowest rate that failed; infinity if none did."""
        return min((one.rate for one in self.probes if not one.passed), default=float("inf"))


def find_knee(
    measure: Callable[[float], Probe],
    start: float,
    *,
    seconds: float,
    step: float = 1.5,
    within: float = 0.05,
    most_steps: int = 12,
    clock: Callable[[], float] = time.monotonic,
) -> Knee:
    """Search for the knee with `measure`, which loads the server at a rate. The first rate is `start`.

    The rate grows or shrinks by the factor `step` until one rate passes and one fails. Then the geometric mean of the
    two is tried, until they differ by less than the share `within`. No probe begins that would probably end more than
    `seconds` after the beginning: a probe is assumed to take as long as the longest before it.
    """
    begin, longest = clock(), 0.0
    probes: list[Probe] = []
    rate = start
    while True:
        before = clock()
        if probes and before + longest - begin > seconds:
            return Knee(tuple(probes), complete=False)
        probes.append(measure(rate))
        longest = max(longest, clock() - before)
        found = Knee(tuple(probes), complete=True)
        if found.rate and found.failed <= found.rate * (1 + within):
            return found
        if found.rate and found.failed < float("inf"):
            rate = (found.rate * found.failed) ** 0.5
        elif len(probes) > most_steps:
            return Knee(tuple(probes), complete=False)
        else:
            rate = found.rate * step if found.rate else found.failed / step
