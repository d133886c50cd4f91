"""The time of a step on a GPU as the report's page draws it: every call on the device, and their total."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ingot.debug.explained import BucketCosts, Call
from ingot.debug.step_time.times import StepTime


class DrawnCall(NamedTuple):
    """A call in the drawing of a step. `name` is its node. `roofline` is the lower bound of its seconds, and `taken`
    are its measured seconds, or the predicted ones."""

    name: str
    kind: str
    flops: int
    bytes: int
    roofline: float
    taken: float


@dataclass(frozen=True)
class DrawnStep:
    """The time of a step of one bucket class, with its calls. `step` is the number of the report's step that made the
    program; `basis` describes the shape of the model step."""

    step: int
    basis: str
    time: StepTime
    calls: tuple[DrawnCall, ...]


def drawn_steps(buckets: Sequence[BucketCosts], steps: Sequence[int], bases: Sequence[str]) -> tuple[DrawnStep, ...]:
    """Return the drawings of the steps with a known time; empty unless the artifact is for a GPU. `steps` and `bases`
    have the number of the report's step and the description of the shape for each of `buckets`."""
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
