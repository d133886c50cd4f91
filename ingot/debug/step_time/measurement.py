"""The measured times of a step on a GPU: as it is served, of each instruction, and by a profiler's trace."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionTime:
    """The measured time of one instruction in seconds: on the device, and of the host to launch it. It is the mean over
    a sequence of equal calls."""

    device: float
    host: float


@dataclass(frozen=True)
class StepTrace:
    """The times of a step from a profiler trace, in seconds. `calls` has the time that each instruction adds to the
    step, None if its kernels were not found in the trace.

    `step` is the time between the ends of two steps. It is None if the host launches the calls of the steps, since the
    profiler slows the host down.
    """

    calls: tuple[float | None, ...]
    step: float | None


@dataclass(frozen=True)
class StepMeasurement:
    """The measured times of a step. `seconds` is the time of a whole step, measured over a sequence of steps as in
    serving. `instructions` has the time of each instruction, measured alone, in order. `trace` has the times from a
    profiler trace, None without one."""

    seconds: float
    instructions: tuple[InstructionTime, ...]
    trace: StepTrace | None = None
