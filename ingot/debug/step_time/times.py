"""What is said of a step's time: of each call, of kinds of calls, and of what stands above the roofline."""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.debug.step_time.work import KINDS

GAPS = "gaps"  # the kind of what passes while no call runs


@dataclass(frozen=True)
class CallTime:
    """Seconds of one call: the least that the device allows (`roofline`, `bound` by "memory" or by "compute"),
    predicted, measured in a row of equal calls, and what it adds to a step by a profiler's trace; None where nothing
    was."""

    kind: str
    bound: str
    roofline: float
    predicted: float
    measured: float | None = None
    traced: float | None = None

    @property
    def taken(self) -> float:
        """Measured where it was, else predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class KindTime:
    """Seconds of all calls of a kind that run on the device: views do not."""

    kind: str
    calls: int
    roofline: float
    predicted: float
    measured: float | None = None
    traced: float | None = None


@dataclass(frozen=True)
class Gap:
    """Equal calls, and the seconds that all of them together stand above their roofline; what would close it. `traced`
    are the same by a profiler's trace."""

    what: str
    calls: int
    seconds: float
    closing: str
    traced: float | None = None


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on `device`, of which `bandwidth` (bytes a second) and `rate` (flops a second, of products in
    the model's dtype) are published. `basis` says where the constants of the prediction come from. `captured`: the step
    is replayed from a graph; else the host launches its calls one by one. `traced` is from one step of a profiler's
    trace to the next."""

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
    """Totals by kind; the last one is what the step takes beside its calls, which is less than nothing where calls
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
    """None where one of them is not known."""
    known = [one for one in seconds if one is not None]
    return sum(known) if known and len(known) == len(seconds) else None
