"""A step whose ending waits for late inputs, which the host fills while the forward segment runs."""

from collections.abc import Callable

import torch

from ingot.ir.errors import InternalError
from ingot.runtime.engines.logprobs import StepLogprobs
from ingot.runtime.steps.executor import StepHandle


class LateStep:
    """The handle of a step that is launched in part: its forward pass, but not its ending, such as sampling. The ending
    waits for late inputs: the host does not know their values yet.

    The caller fills these inputs and calls `finish`. Results can be read after that.

    bucket   the name of the bucket class that runs the step (a range of step sizes with one compiled plan)
    end      launches the ending, and returns the handle of the whole step
    """

    def __init__(self, bucket: str, end: Callable[[], StepHandle]) -> None:
        self.bucket = bucket
        self._end: Callable[[], StepHandle] | None = end
        self._handle: StepHandle | None = None

    def finish(self) -> None:
        if self._end is not None:
            end, self._end = self._end, None
            self._handle = end()

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        return self._ended().outputs

    def tokens(self) -> list[int]:
        return self._ended().tokens()

    def rejected(self) -> list[int]:
        return self._ended().rejected()

    def logprobs(self) -> StepLogprobs:
        return self._ended().logprobs()

    def vectors(self) -> torch.Tensor:
        return self._ended().vectors()

    def _ended(self) -> StepHandle:
        if self._handle is None:
            raise InternalError("a step with late inputs is read before its ending is launched")
        return self._handle
