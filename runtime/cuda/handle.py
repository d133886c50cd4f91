"""The handle of a launched step on a GPU."""

from collections.abc import Callable, Mapping

import torch

from ingot.runtime.engines.logprobs import OutputLogprobs
from ingot.runtime.steps.step_outputs import VECTORS


class CudaStepHandle:
    """The handle of a launched step. Methods that read results wait until the GPU has computed them.

    bucket             the name of the bucket class that runs the step (a range of step sizes with one compiled plan)
    outputs            the step's outputs on the GPU, by name
    read               a function from an output's name to its values on the host; called after `done`
    done               an event that the constructor records on the current stream
    returns_logprobs   whether a request needs log-probabilities from the step
    lend               a function from `outputs` to the tensors that a caller may use. Those of a CUDA graph are valid
                       until the next step
    check              called when the step is complete, before its results are read; raises RankError if they are not
                       valid, because another rank is gone
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
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.bucket = bucket
        self._outputs = dict(outputs)
        self._read = read
        self._lend = lend
        self._check = check
        names = (*(("logprob_ids", "logprobs", "ranks") if returns_logprobs else ()), *self._outputs.keys() & {VECTORS})
        self._copies = {name: to_host(self._outputs[name]) for name in names}
        self._done = done
        self._done.record()

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs by name, on the GPU. Reading this waits for the step, so the caller may use the outputs on any
        stream. Outputs of a CUDA graph are valid until the next step is launched."""
        self._wait()
        return self._lend(self._outputs)

    def finish(self) -> None:
        """Do nothing: the whole step has been launched, including its last part, such as sampling."""

    def tokens(self) -> list[int]:
        """Wait for the step and return the sampled token of each row of logits. -1 means that the logits were not
        finite."""
        self._wait()
        return self._read("tokens")

    def rejected(self) -> list[int]:
        """Wait for the step and return, for each sequence, how many of its last tokens in the step were rejected. They
        are draft tokens, or with block diffusion a block that was not accepted."""
        self._wait()
        return self._read("rejected")

    def logprobs(self) -> OutputLogprobs:
        """Wait for the step and return its log-probabilities; `row(i)` of the result has those of row i of logits."""
        self._wait()
        return OutputLogprobs(self._copies["logprob_ids"], self._copies["logprobs"], self._copies["ranks"])

    def vectors(self) -> torch.Tensor:
        """Wait for the step and return the pooled vector of each sequence, f32[B, N] on the host."""
        self._wait()
        return self._copies[VECTORS]

    def _wait(self) -> None:
        self._done.synchronize()
        self._check()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying a tensor to pinned host memory, and return the copy without waiting for it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
