"""The time of a step on a GPU as the page draws it: every call on the device, and their total."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ingot.debug.explained import BucketCosts, Call
from ingot.debug.step_time.times import StepTime


class DrawnCall(NamedTuple):
    """A call of the step, by its node; `taken` are its seconds, measured or else predicted."""

    name: str
    kind: str
    flops: int
    bytes: int
    roofline: float
    taken: float


@dataclass(frozen=True)
class DrawnStep:
    """A step of one bucket class, after the pass with the number `step`; `basis` describes the step in words."""

    step: int
    basis: str
    time: StepTime
    calls: tuple[DrawnCall, ...]


def drawn_steps(buckets: Sequence[BucketCosts], steps: Sequence[int], bases: Sequence[str]) -> tuple[DrawnStep, ...]:
    """Return the steps with a known time, each with its pass number and basis; none unless the artifact is for a
    GPU."""
    return tuple(
        DrawnStep(step, basis, costs.time, tuple(_drawn(call) for call in costs.calls if _runs(call)))
        for costs, step, basis in zip(buckets, steps, bases, strict=True)
        if costs.time is not None
    )


def _runs(call: Call) -> bool:
    return call.time is not None and call.time.taken > 0


def _drawn(call: Call) -> DrawnCall:
    assert call.time is not None
    return DrawnCall(call.name, call.time.kind, call.flops, call.bytes, call.time.roofline, call.time.taken)
