"""The measurements of a step on a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionTime:
    """Seconds of one call in a sequence of equal ones: on the device, and on the host until it is launched."""

    device: float
    host: float


@dataclass(frozen=True)
class StepTrace:
    """Seconds from a profiler's trace. `calls` are the seconds that each instruction adds to a step, None if its
    kernels were not found. `step` is the time between the ends of two steps, None for steps that wait for the host,
    which the profiler slows down."""

    calls: tuple[float | None, ...]
    step: float | None


@dataclass(frozen=True)
class StepMeasurement:
    """Seconds of a step as it is served in a sequence of steps, of its instructions in order, and by a trace."""

    seconds: float
    instructions: tuple[InstructionTime, ...]
    trace: StepTrace | None = None
