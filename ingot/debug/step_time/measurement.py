"""The measured times of a step on a GPU: as it is served, of each instruction, and by a profiler's trace."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionTime:
    """The measured time of one instruction, in seconds.

    `device` is its time on the device, and `host` the host's time to launch it. Both are means over a sequence of equal
    calls.
    """

    device: float
    host: float


@dataclass(frozen=True)
class StepTrace:
    """The times of a step from a profiler trace, in seconds.

    `calls` has the time that each instruction adds to the step. It is None if the instruction's kernels were not found
    in the trace. `step` is the time from the end of one step to the end of the next. It is None if the host launches
    the step's calls, since the profiler slows the host down.
    """

    calls: tuple[float | None, ...]
    step: float | None


@dataclass(frozen=True)
class StepMeasurement:
    """The measured times of a step.

    `seconds` is the time of a whole step, measured over a sequence of steps as in serving. `instructions` has the time
    of each instruction alone, in order. `trace` has the times from a profiler trace; None if there is no trace.
    """

    seconds: float
    instructions: tuple[InstructionTime, ...]
    trace: StepTrace | None = None
