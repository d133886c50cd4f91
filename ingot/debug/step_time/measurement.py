"""The measured times of a step on a GPU: as it is served, of each instruction, and by a profiler's trace."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionTime:
    """Seconds of one call, measured in a sequence of equal calls: its time on the device, and the host's time to launch
    it."""

    device: float
    host: float


@dataclass(frozen=True)
class StepTrace:
    """Seconds of a step from a profiler's trace. `calls` are the seconds that each instruction adds to the step, None
    if its kernels were not found. `step` is the time between the ends of two steps. It is None for steps that wait for
    the host, which the profiler slows down."""

    calls: tuple[float | None, ...]
    step: float | None


@dataclass(frozen=True)
class StepMeasurement:
    """The measured times of a step. `seconds` is the time of one step in a sequence of steps, as they are served.
    `instructions` are the times of its instructions, in order. `trace` is None if no trace was recorded."""

    seconds: float
    instructions: tuple[InstructionTime, ...]
    trace: StepTrace | None = None
