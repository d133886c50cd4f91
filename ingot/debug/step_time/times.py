"""The times of a step: of each call, of kinds of calls, and of the gaps above the roofline."""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.debug.step_time.work import KINDS

GAPS = "gaps"  # the kind for time in which no call runs


@dataclass(frozen=True)
class CallTime:
    """The time of one call on the device, in seconds.

    kind        its group in totals, such as "attention"
    bound       what limits the roofline: "memory" or "compute"
    roofline    the lower bound by the GPU's bandwidth and matmul rate
    predicted   the time that the model of its kernels predicts
    measured    its time in a sequence of equal calls; None if not measured
    traced      the time that it adds to a step in a profiler trace; None if not traced
    """

    kind: str
    bound: str
    roofline: float
    predicted: float
    measured: float | None = None
    traced: float | None = None

    @property
    def taken(self) -> float:
        """Return the measured seconds of the call; if it was not measured, the predicted seconds."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class KindTime:
    """The total seconds of a step's calls of one kind, such as "attention".

    `calls` is the number of these calls. Views are not counted, since they run nothing on the device.
    """

    kind: str
    calls: int
    roofline: float
    predicted: float
    measured: float | None = None
    traced: float | None = None


@dataclass(frozen=True)
class Gap:
    """The time that equal calls of a step take above their roofline, or the time between calls.

    The roofline is the lower bound by bandwidth and flops. `what` describes the calls. `seconds` is the sum over the
    calls. `closing` is advice how to close the gap. `traced` is the sum by a profiler trace; None without a trace.
    """

    what: str
    calls: int
    seconds: float
    closing: str
    traced: float | None = None


@dataclass(frozen=True)
class StepTime:
    """The time of a step on a GPU, in seconds.

    `bandwidth` is the GPU's published memory bandwidth in bytes a second. `rate` is its published number of matmul
    flops a second, in the dtype of the step's matmuls. `basis` names the GPU on which the constants of the prediction
    were measured.

    `captured` is True if a CUDA graph replays the step. Otherwise the host launches its calls one by one. `measured` is
    None if the step was not measured. `traced` is the time between two steps in a profiler trace; None without a trace.
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
    """Return the total time of each kind of call in a step, such as "attention".

    The last item, "gaps", is the time of the step in which no call runs. It is negative if calls overlap. `predicted`,
    `measured` and `traced` are the seconds of the whole step. The last two are None if unknown.
    """
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
    """Return the sum of `seconds`. Return None if the list is empty or an item is None (unknown)."""
    known = [one for one in seconds if one is not None]
    return sum(known) if known and len(known) == len(seconds) else None
