"""Launches the steps of an engine on all ranks of a mesh."""

import math
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from ingot.runtime.engines.logprobs import StepLogprobs
from ingot.runtime.ranks.leader import Leader
from ingot.runtime.steps.executor import SampledStep, StepHandle, StepLauncher
from ingot.runtime.steps.late_step import LateStep
from ingot.runtime.steps.step import StepInputs

T = TypeVar("T")


class MeshStep:
    """The handle of a launched step of a mesh. Reading its results raises RankError if a rank is gone.

    On a GPU, a step waits for the other ranks after its launch. A fault ends it, with results that mean nothing.
    """

    def __init__(self, own: SampledStep, leader: Leader) -> None:
        self._own, self._leader = own, leader

    def finish(self) -> None:
        self._own.finish()

    def tokens(self) -> list[int]:
        return self._read(self._own.tokens)

    def rejected(self) -> list[int]:
        return self._read(self._own.rejected)

    def logprobs(self) -> StepLogprobs:
        return self._read(self._own.logprobs)

    def vectors(self) -> torch.Tensor:
        return self._read(self._own.vectors)

    def _read(self, read: Callable[[], T]) -> T:
        with self._leader.together():
            found = read()
        self._leader.check()
        return found


class MeshLauncher(StepLauncher):
    """Posts each step to the other ranks, and runs rank 0's part of it in this process.

    With pipeline stages, a step returns when rank 0's stage has computed, or on a GPU when it has been launched. Its
    ending brings the tokens back from the last stage. It is launched when they are read, or before that, with the step
    as many steps later as there are stages. That step may read the tokens on the device.

    own      runs rank 0's part
    leader   reaches the other ranks
    stages   the number of pipeline stages
    """

    def __init__(self, own: StepLauncher, leader: Leader, stages: int) -> None:
        self._own, self._leader, self._stages = own, leader, stages
        self._not_ended: deque[_StagedStep] = deque()

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Run a step on all ranks, and return the handle of rank 0's part. Raises RankError if a rank is gone."""
        while len(self._not_ended) >= self._stages > 1:
            self._end(self._not_ended[0])  # this step may read its tokens on the device
        self._leader.post(inputs)
        if self._stages > 1:
            inputs = inputs.copied()  # the ending may run after the engine gave the step up, and used the buffer again
        with self._leader.together():
            handle = self._own.launch(inputs)
        if self._stages > 1:
            self._not_ended.append(_StagedStep(handle, self._end))
            return MeshStep(self._not_ended[-1], self._leader)
        if not inputs.ends_late:
            return MeshStep(handle, self._leader)

        def end() -> StepHandle:
            self._leader.post_late(inputs)
            with self._leader.together():
                handle.finish()
            return handle  # type: ignore[return-value]  # a LateStep, which is a StepHandle too

        return MeshStep(LateStep("mesh", end), self._leader)

    def _end(self, step: "_StagedStep") -> None:
        """Run the endings of the steps up to this one on all ranks, in the order of their launches."""
        while step in self._not_ended:
            first = self._not_ended.popleft()
            self._leader.post_ending()
            with self._leader.together():
                first.handle.finish()

    def prepare(self, seconds: float = math.inf) -> bool:
        """Look whether all ranks run, while the host is idle. Return False: no work is left. Raises RankError."""
        self._leader.check()
        return False


class _StagedStep(LateStep):
    """A step after the computation of rank 0's stage. Reading a result runs its ending, on all ranks.

    handle   the handle of rank 0's part
    end      runs the ending of this step, and of those before
    """

    def __init__(self, handle: SampledStep, end: "Callable[[_StagedStep], None]") -> None:
        def ended() -> StepHandle:
            end(self)
            return handle  # type: ignore[return-value]  # a LateStep, which is a StepHandle too

        super().__init__("mesh", ended)
        self.handle = handle

    def _ended(self) -> StepHandle:
        self.finish()
        return super()._ended()
