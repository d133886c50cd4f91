"""A round: the entries of a model that run in each step, in order, on the same inputs and states.

With LoRA adapters, an entry of its own runs the steps that use one.
"""

import math
from collections.abc import Sequence

from ingot.runtime.steps.executor import Executor, SampledStep, StepHandle, StepLauncher
from ingot.runtime.steps.late_step import LateStep
from ingot.runtime.steps.step import StepInputs


class Round(StepLauncher):
    """Launches several programs in each step, such as a model and then its draft model. They run on one CUDA stream, so
    each program reads KV caches and other states as the programs before it left them."""

    def __init__(self, entries: Sequence[Executor]) -> None:
        self._entries = tuple(entries)

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Start a step of every program, in order, without waiting. Return the handle of the first program's step.
        Raises StepMemoryError if the device has no memory for the step."""
        first, *others = self._entries
        handle = first.launch(inputs)
        if not inputs.ends_late or not others:
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
        """Do one piece of work for later steps while the host is idle, such as the capture of a CUDA graph. Earlier
        programs come first.

        `seconds` is how long the host is idle. Return False if no work is left that fits into this time.
        """
        return any(entry.prepare(seconds) for entry in self._entries)


class WithAdapters(StepLauncher):
    """Launches steps in which a sequence uses a LoRA adapter through one program, and all others through another.

    Both programs share the weights, the KV caches and the CUDA stream. So steps without adapters cost what they cost in
    an artifact without adapters.

    plain     runs the steps without adapters
    adapted   runs the others
    """

    def __init__(self, plain: Round, adapted: Executor) -> None:
        self._plain, self._adapted = plain, adapted

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Start a step without waiting, and return its handle. Raises StepMemoryError if the device has no memory."""
        return (self._adapted if inputs.uses_adapters else self._plain).launch(inputs)

    def prepare(self, seconds: float = math.inf) -> bool:
        """Do one piece of work for later steps while the host is idle, first for steps without adapters.

        `seconds` is how long the host is idle. Return False if no work is left that fits into this time.
        """
        return self._plain.prepare(seconds) or self._adapted.prepare(seconds)
