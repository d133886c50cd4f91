"""The times of a step: of each call, of kinds of calls, and of the gaps above the roofline."""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.debug.step_time.work import KINDS

GAPS = "gaps"  # the kind for time in which no call runs


@dataclass(frozen=True)
class CallTime:
    """Seconds of one call: the device's lower bound (`roofline`, `bound` by "memory" or by "compute"), predicted,
    measured in a sequence of equal calls, and added to a step by a profiler's trace; None if not measured."""

    kind: str
    bound: str
    roofline: float
    predicted: float
    measured: float | None = None
    traced: float | None = None

    @property
    def taken(self) -> float:
        """Return the measured seconds, or else the predicted ones."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class KindTime:
    """Seconds of all calls of a kind that run on the device; views do not."""

    kind: str
    calls: int
    roofline: float
    predicted: float
    measured: float | None = None
    traced: float | None = None


@dataclass(frozen=True)
class Gap:
    """Equal calls, the seconds of all of them above their roofline, and what would close the gap. `traced` are the
    seconds by a profiler's trace."""

    what: str
    calls: int
    seconds: float
    closing: str
    traced: float | None = None


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on `device`, with published `bandwidth` (bytes a second) and `rate` (flops a second, of matmuls
    in the model's dtype). `basis` is the source of the prediction's constants. `captured`: the step is replayed from a
    graph; otherwise the host launches its calls one by one. `traced` is the time between two steps of a profiler's
    trace."""

    device: str
    bandwidth: int
    rate: float
    basis: str
    captured: bool
    roofline: float
    predicted: float
    measured: float | None
    traced: float | None
    kinds: tuple[KindTime, ...]
    gaps: tuple[Gap, ...]


def kind_times(
    calls: list[CallTime], predicted: float, measured: float | None, traced: float | None = None
) -> tuple[KindTime, ...]:
    """Return the totals by kind. The last one is the step's time besides its calls, which is negative if calls
    overlap."""
    found = [_kind_time(kind, [one for one in calls if one.kind == kind and one.predicted]) for kind in KINDS]
    between = KindTime(
        GAPS,
        0,
        0.0,
        predicted - sum(one.predicted for one in calls),
        None if measured is None else measured - sum(one.taken for one in calls),
        None if traced is None else traced - sum(one.traced or 0.0 for one in calls),
    )
    return (*(one for one in found if one.calls), between)


def _kind_time(kind: str, calls: list[CallTime]) -> KindTime:
    return KindTime(
        kind,
        len(calls),
        sum(one.roofline for one in calls),
        sum(one.predicted for one in calls),
        total([one.measured for one in calls]),
        total([one.traced for one in calls]),
    )


def total(seconds: Sequence[float | None]) -> float | None:
    """Return the sum; None if one of the seconds is unknown."""
    known = [one for one in seconds if one is not None]
    return sum(known) if known and len(known) == len(seconds) else None
