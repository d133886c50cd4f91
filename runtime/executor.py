"""The protocols of executors, which run plans, and of the steps that they launch.

Each device has an executor, a subclass that only `ingot.runtime.loader` names. All other code uses these protocols: an
engine uses `StepLauncher`, all others use `Executor`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ingot.ir.artifact.plan import Plan
from ingot.ir.types import TensorType
from ingot.runtime.bucket import Watch
from ingot.runtime.logprobs import StepLogprobs
from ingot.runtime.states import States
from ingot.runtime.step import StepInputs


class SampledStep(Protocol):
    """The handle of a launched step, with the results that an engine reads: tokens, log-probabilities, vectors."""

    def finish(self) -> None:
        """Launch the last part of the step (such as sampling), if it waits for late inputs: those whose values were not
        known when the step was launched. The host must have filled them. Do nothing for other steps."""
        ...

    def tokens(self) -> list[int]:
        """Wait for the step and return the sampled token of each row of logits; -1 for non-finite logits."""
        ...

    def rejected(self) -> list[int]:
        """Wait for the step and return one number for each sequence: how many of its last tokens in the step were
        rejected. Only for steps with draft tokens or with block diffusion."""
        ...

    def logprobs(self) -> StepLogprobs:
        """Wait for the step and return its log-probabilities. `row` of the result returns those of one row of logits.
        Only for steps in which a request needs log-probabilities."""
        ...

    def vectors(self) -> torch.Tensor:
        """Wait for the step and return the pooled vector (embedding) of each sequence, f32[B, N] on the host. Only for
        steps of pooling models."""
        ...


class StepHandle(SampledStep, Protocol):
    """The handle of a launched step, with access to all of its outputs on the device. Engines need only `SampledStep`;
    other code, such as debugging tools, reads outputs."""

    @property
    def bucket(self) -> str:
        """The name of the bucket class (range of step sizes that shares one compiled plan) that runs the step."""
        ...

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs by name, on the executor's device. Waits for the step. The next launched step may overwrite
        them."""
        ...


class StepLauncher(Protocol):
    """Launches steps for an engine, in launch order. It is one executor, or several for each step, such as those of a
    model and its draft model (`ingot.runtime.round`)."""

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Start a step on `inputs`, which are on the host, and return its handle without waiting. The caller must not
        change the inputs until `tokens()` of this step has returned.

        Before the step, recompute the token counts (for penalties) of the sequences in `inputs.recounts`. Raises
        StepMemoryError if the device has no memory for the step. In that case the caches and token counts of its
        sequences may have been written in part.
        """
        ...


@dataclass(frozen=True)
class Captured:
    """The CUDA graphs that were captured so far, with the seconds that each capture took.

    decode    graphs of decode steps, by batch size
    shared    graphs of decode steps with cascade attention (shared prefixes are read once), by batch size
    prompts   graphs of steps that prefill, by (tokens, sequences)
    """

    decode: Mapping[int, float] = field(default_factory=dict)
    shared: Mapping[int, float] = field(default_factory=dict)
    prompts: Mapping[tuple[int, int], float] = field(default_factory=dict)


NOTHING_CAPTURED = Captured()


class Executor(StepLauncher, Protocol):
    """Runs one compiled program, such as the model or its draft model, with its weights and states on one device.

    plan      the compiled program
    inputs    the types of a step's inputs by name
    params    the weights by name, on the device
    states    KV caches and other tensors that are kept between steps, of all programs of the artifact, on the device
    sizes     the symbolic dims that are known at load time: `pages`, `R` (maximum running sequences), `S` (slots of
              convolution and scan states)
    replays   whether steps may replay CUDA graphs, whose instructions a `watch` does not see

    Steps run in launch order. The executors of one artifact share weights and states, so this order holds across all of
    them.
    """

    plan: Plan
    inputs: dict[str, TensorType]
    params: dict[str, torch.Tensor]
    states: States
    sizes: dict[str, int]
    replays: bool

    @property
    def captured(self) -> Captured:
        """The CUDA graphs that were captured so far, with the seconds that each capture took; none on a CPU."""
        ...

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> StepHandle:
        """Start a step on `inputs`, which are on the host by name, and return its handle without waiting. The step
        updates the KV caches and other states.

        watch   a debugging hook: called with each instruction in place of running it; returns the instruction's result

        Raises StepMemoryError if the device has no memory for the step.
        """
        ...

    def warm_up(self) -> None:
        """Do the setup that the first steps would wait for, such as loading kernels. This does not change the KV cache
        or other states, and the weights need not be loaded yet. Raises OptionError if there is no memory for the
        largest step."""
        ...

    def capture(self, rows: int) -> None:
        """Capture a CUDA graph for decode steps with batch size `rows`. Do nothing if the graph exists, or if no graph
        can run such steps. Raises OptionError if there is no memory for the graph."""
        ...

    def capture_all(self) -> None:
        """Capture every CUDA graph that this executor may ever replay and that does not exist yet. Raises OptionError
        if there is no memory for one."""
        ...

    def prepare(self, seconds: float = math.inf) -> bool:
        """Do one piece of work for later steps, such as the capture of a CUDA graph, while the host is idle for
        `seconds`. Running steps are not disturbed. Return False if nothing is left to do that fits into that time."""
        ...

    def synchronize(self) -> None:
        """Wait for all launched steps."""
        ...
