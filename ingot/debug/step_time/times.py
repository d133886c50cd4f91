"""The times of a step: of each call, of kinds of calls, and of the gaps above the roofline."""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.debug.step_time.work import KINDS

GAPS = "gaps"  # the kind for time in which no call runs


@dataclass(frozen=True)
class CallTime:
    """Seconds of one call. `kind` is its group in totals, such as "attention". `roofline` is the lower bound on the
    device, set by `bound`: "memory" or "compute". `predicted` comes from the model of its kernels. `measured` is its
    time in a sequence of equal calls, `traced` what it adds to a step in a profiler's trace; None if not measured."""

    kind: str
    bound: str
    roofline: float
    predicted: float
    measured: float | None = None
    traced: float | None = None

    @property
    def taken(self) -> float:
        """Return the measured seconds of the call, or the predicted ones if it was not measured."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class KindTime:
    """Total seconds of all calls of one kind, such as "attention", in a step. `calls` counts them without views, which
    run nothing on the device."""

    kind: str
    calls: int
    roofline: float
    predicted: float
    measured: float | None = None
    traced: float | None = None


@dataclass(frozen=True)
class Gap:
    """The time that equal calls of a step take above their roofline. `what` describes the calls, `seconds` is the total
    of the gap, and `closing` says in words what would close it. `traced` is the total by a profiler's trace, None
    without one."""

    what: str
    calls: int
    seconds: float
    closing: str
    traced: float | None = None


@dataclass(frozen=True)
class StepTime:
    """The time of a step on the GPU `device`, in seconds.

    `bandwidth` (bytes a second) and `rate` (flops a second of matmuls in the model's dtype) are published numbers.
    `basis` is the source of the prediction's constants. If `captured`, a CUDA graph replays the step; otherwise the
    host launches its calls one by one. `traced` is the time between two steps in a profiler's trace.
    """

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
    """Return the total time of each kind of call in a step. The last item is the time of the step outside its calls,
    which is negative if calls overlap. `predicted`, `measured` and `traced` are the seconds of the whole step."""
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
    """Return the sum of `seconds`; None if one of them is unknown or there are none."""
    known = [one for one in seconds if one is not None]
    return sum(known) if known and len(known) == len(seconds) else None
