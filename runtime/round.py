"""A round: the entries of a model that run in each step, in order, on the same inputs and states."""

import math
from collections.abc import Sequence

from ingot.runtime.executor import Executor, SampledStep, StepHandle, StepLauncher
from ingot.runtime.late_step import LateStep
from ingot.runtime.step import StepInputs


class Round(StepLauncher):
    """Launches several entries for each step, such as a model and its draft. The handle of a step is that of the first
    entry.

    The entries share a stream, so each reads the states as the entries before it left them.
    """

    def __init__(self, entries: Sequence[Executor]) -> None:
        self._entries = tuple(entries)

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Start a step of every entry, in order, and return the first entry's handle without waiting. Raises
        StepMemoryError if the device has no memory for the step."""
        first, *others = self._entries
        handle = first.launch(inputs)
        if not inputs.layout.late or not others:
            for entry in others:
                entry.launch(inputs)
            return handle

        def end() -> StepHandle:
            handle.finish()
            for entry in others:
                entry.launch(inputs).finish()
            return handle

        return LateStep(handle.bucket, end)

    def prepare(self, seconds: float = math.inf) -> bool:
        """Do one piece of preparation for later steps, of the first entry that has any left, while the host is idle for
        `seconds`. Return False if nothing is left that fits into that time."""
        return any(entry.prepare(seconds) for entry in self._entries)
