"""Launches the steps of an engine on all ranks of a mesh."""

import math

from ingot.runtime.executor import SampledStep, StepHandle, StepLauncher
from ingot.runtime.late_step import LateStep
from ingot.runtime.ranks.leader import Leader
from ingot.runtime.round import Round
from ingot.runtime.step import StepInputs


class MeshLauncher(StepLauncher):
    """Posts each step to the other ranks, and runs rank 0's part of it in this process.

    own      runs rank 0's part
    leader   reaches the other ranks
    """

    def __init__(self, own: Round, leader: Leader) -> None:
        self._own, self._leader = own, leader

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Run a step on all ranks, and return the handle of rank 0's part. Raises RankError if a rank is gone."""
        self._leader.post(inputs)
        with self._leader.together():
            handle = self._own.launch(inputs)
        if not inputs.ends_late:
            return handle

        def end() -> StepHandle:
            self._leader.post_late(inputs)
            with self._leader.together():
                handle.finish()
            return handle  # type: ignore[return-value]  # a LateStep, which is a StepHandle too

        return LateStep("mesh", end)

    def prepare(self, seconds: float = math.inf) -> bool:
        """Look whether all ranks run, while the host is idle. Return False: no work is left. Raises RankError."""
        self._leader.check()
        return False
