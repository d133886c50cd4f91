"""A step whose ending waits for late inputs, which the host fills while the forward segment runs."""

from collections.abc import Callable

import torch

from ingot.ir.errors import InternalError
from ingot.runtime.executor import StepHandle
from ingot.runtime.logprobs import StepLogprobs


class LateStep:
    """The handle of a step that is launched only in part: its forward pass, but not its ending (such as sampling),
    which needs inputs that are not known yet.

    The caller fills these inputs and calls `finish`. That calls `end`, which launches the ending and returns the handle
    of the whole step. `bucket` is the name of the step's bucket class (range of step sizes that shares one compiled
    plan).
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
