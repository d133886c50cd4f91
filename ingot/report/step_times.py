"""The time of a step on a GPU as the report's page draws it: every call on the device, and their total."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ingot.debug.explained import BucketCosts, Call
from ingot.debug.step_time.times import StepTime


class DrawnCall(NamedTuple):
    """A call in the report's drawing of a step. `name` is its node, and `kind` its group, such as "attention".

    `roofline` is the lower bound of its time in seconds. `taken` is the measured time. If it was not measured, it is
    the predicted time.
    """

    name: str
    kind: str
    flops: int
    bytes: int
    roofline: float
    taken: float


@dataclass(frozen=True)
class DrawnStep:
    """The time of one step of a bucket class (a range of step sizes) and of its calls.

    `step` is the number of the report's step with the program. `basis` describes the model step, such as "a step of 512
    tokens".
    """

    step: int
    basis: str
    time: StepTime
    calls: tuple[DrawnCall, ...]


def drawn_steps(buckets: Sequence[BucketCosts], steps: Sequence[int], bases: Sequence[str]) -> tuple[DrawnStep, ...]:
    """Return the steps that the report draws: those with a known time. There are none unless the artifact is for a GPU.

    `buckets`, `steps` and `bases` have an item for each bucket class (range of step sizes). `steps` has the number of
    the report's step with its program. `bases` has a description, such as "a step of 512 tokens".
    """
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
