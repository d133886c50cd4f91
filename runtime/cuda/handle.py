"""A step on its way on a GPU."""

from collections.abc import Callable, Mapping

import torch

from ingot.runtime.logprobs import OutputLogprobs
from ingot.runtime.step_outputs import VECTORS


class CudaStepHandle:
    """A launched step of the bucket class `bucket`.

    `outputs` lie on the device. `read` gives one that the host reads, by name, once the event `done` has come, which is
    recorded here on the current stream. Every question to the handle waits for that. `lend` gives out outputs that are
    there for a time only.
    """

    def __init__(
        self,
        bucket: str,
        outputs: Mapping[str, torch.Tensor],
        read: Callable[[str], list[int]],
        done: torch.cuda.Event,
        *,
        rated: bool,
        lend: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
    ) -> None:
        self.bucket = bucket
        self._outputs = dict(outputs)
        self._read = read
        self._lend = lend
        names = (*(("logprob_ids", "logprobs", "ranks") if rated else ()), *self._outputs.keys() & {VECTORS})
        self._copies = {name: to_host(self._outputs[name]) for name in names}
        self._done = done
        self._done.record()

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs by name. They were made on the executor's stream, and are there for every other one now; those of
        a captured graph until the next step is launched."""
        self._done.synchronize()
        return self._lend(self._outputs)

    def finish(self) -> None:
        """Nothing: its ending was launched with it."""

    def tokens(self) -> list[int]:
        """The sampled token of each row of logits; -1 where the logits were not finite."""
        self._done.synchronize()
        return self._read("tokens")

    def rejected(self) -> list[int]:
        """Of each sequence, how many of the last tokens that it fed were not kept."""
        self._done.synchronize()
        return self._read("rejected")

    def logprobs(self) -> OutputLogprobs:
        """The log-probabilities that were asked for, by row of logits."""
        self._done.synchronize()
        return OutputLogprobs(self._copies["logprob_ids"], self._copies["logprobs"], self._copies["ranks"])

    def vectors(self) -> torch.Tensor:
        """f32[B, N] on the host: the vector of each sequence."""
        self._done.synchronize()
        return self._copies[VECTORS]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, on its way when this returns."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
