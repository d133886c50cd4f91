"""The handle of a launched step on a GPU."""

from collections.abc import Callable, Mapping

import torch

from ingot.runtime.logprobs import OutputLogprobs
from ingot.runtime.step_outputs import VECTORS


class CudaStepHandle:
    """The handle of a launched step. Its results can be read once the GPU has computed them. `bucket` is the name of
    the bucket class (range of step sizes that shares one compiled plan) that runs it.

    outputs            the step's outputs on the GPU, by name
    read               a function that returns the values of an output that was copied to the host, by its name; called
                       after `done`
    done               an event that the constructor records on the current stream; every method that reads results
                       waits for it
    returns_logprobs   whether the step computes log-probabilities that a request needs
    lend               called with `outputs` when a caller takes them. It returns the tensors to hand out. Those of a
                       CUDA graph are valid until the next step
    """

    def __init__(
        self,
        bucket: str,
        outputs: Mapping[str, torch.Tensor],
        read: Callable[[str], list[int]],
        done: torch.cuda.Event,
        *,
        returns_logprobs: bool,
        lend: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
    ) -> None:
        self.bucket = bucket
        self._outputs = dict(outputs)
        self._read = read
        self._lend = lend
        names = (*(("logprob_ids", "logprobs", "ranks") if returns_logprobs else ()), *self._outputs.keys() & {VECTORS})
        self._copies = {name: to_host(self._outputs[name]) for name in names}
        self._done = done
        self._done.record()

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs by name, on the GPU. Waits for the step, so that the caller may use them on any stream. Outputs
        of a CUDA graph are valid until the next step is launched."""
        self._done.synchronize()
        return self._lend(self._outputs)

    def finish(self) -> None:
        """Do nothing: the whole step has been launched, with its ending (such as sampling)."""

    def tokens(self) -> list[int]:
        """Wait for the step and return the sampled token of each row of logits; -1 for non-finite logits."""
        self._done.synchronize()
        return self._read("tokens")

    def rejected(self) -> list[int]:
        """Wait for the step and return one number for each sequence: how many of its last tokens in the step were
        rejected. They are rejected drafts, or with block diffusion a block that was not accepted."""
        self._done.synchronize()
        return self._read("rejected")

    def logprobs(self) -> OutputLogprobs:
        """Wait for the step and return its log-probabilities. `row` of the result returns those of one row of
        logits."""
        self._done.synchronize()
        return OutputLogprobs(self._copies["logprob_ids"], self._copies["logprobs"], self._copies["ranks"])

    def vectors(self) -> torch.Tensor:
        """Wait for the step and return the pooled vector of each sequence, f32[B, N] on the host."""
        self._done.synchronize()
        return self._copies[VECTORS]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying a tensor to pinned host memory, and return the copy without waiting for it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
