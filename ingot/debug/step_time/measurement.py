"""What was measured of a step on a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionTime:
    """Seconds of one call in a row of equal ones: on the device, and of the host until it has launched it."""

    device: float
    host: float


@dataclass(frozen=True)
class StepTrace:
    """Seconds by a profiler's trace: what each instruction adds to a step, None where its kernels were not found in it;
    and from the end of a step to that of the next one, None of steps that wait for the host, which the profiler slows
    down."""

    calls: tuple[float | None, ...]
    step: float | None


@dataclass(frozen=True)
class StepMeasurement:
    """Seconds of a step as it is served, one behind the other, of its instructions in order, and by a trace."""

    seconds: float
    instructions: tuple[InstructionTime, ...]
    trace: StepTrace | None = None
