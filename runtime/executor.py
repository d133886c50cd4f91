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
    """The handle of a launched step, with the results that an engine reads."""

    def finish(self) -> None:
        """Launch the ending of a step, if it waits for late inputs, which the host has filled. Do nothing for other
        steps."""
        ...

    def tokens(self) -> list[int]:
        """Wait for the step and return the sampled token of each row of logits; -1 for non-finite logits."""
        ...

    def rejected(self) -> list[int]:
        """Wait for the step and return for each sequence how many of the last tokens that it fed were rejected. Only
        for steps with drafts or denoised blocks."""
        ...

    def logprobs(self) -> StepLogprobs:
        """Wait for the step and return the log-probabilities that requests need, by row of logits. Only for steps that
        compute some."""
        ...

    def vectors(self) -> torch.Tensor:
        """Wait for the step and return the pooled vector of each sequence, f32[B, N] on the host. Only for steps that
        pool."""
        ...


class StepHandle(SampledStep, Protocol):
    """The handle of a launched step, with all of its outputs, for code other than engines."""

    @property
    def bucket(self) -> str:
        """The name of the bucket class that serves the step."""
        ...

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs by name, on the executor's device. Waits for the step. The next launched step may overwrite
        them."""
        ...


class StepLauncher(Protocol):
    """Launches steps for an engine: the executor of an entry, or the executors of all entries of a step
    (`ingot.runtime.round`). Steps run in launch order.
    """

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Start a step on these inputs, which are on the host, and return its handle without waiting.

        Before the step, recomputes the token counts of the rows in `inputs.recounts`. The caller must not change the
        inputs until `tokens()` of this step has returned. Raises StepMemoryError if the device has no memory for the
        step; rows, pages and token counts of its sequences may then have been written.
        """
        ...


@dataclass(frozen=True)
class Captured:
    """The seconds that capturing each CUDA graph took.

    decode    graphs of decode steps, by number of sequences
    shared    graphs of decode steps that read shared prefixes once, by number of sequences
    prompts   graphs of steps that prefill, by (tokens, sequences)
    """

    decode: Mapping[int, float] = field(default_factory=dict)
    shared: Mapping[int, float] = field(default_factory=dict)
    prompts: Mapping[tuple[int, int], float] = field(default_factory=dict)


NOTHING_CAPTURED = Captured()


class Executor(StepLauncher, Protocol):
    """Runs the plan of one entry, bound to weights, executables and states on one device.

    plan      the entry's plan
    inputs    the types of a step's inputs by name
    params    the plan's weights by name, on the device
    states    the states of all entries, on the device
    sizes     the dims that are known at load time: `pages`, `R` device rows, `S` state slots
    replays   whether steps may replay captured graphs, whose instructions a `watch` does not see

    Steps run in launch order. Executors of one artifact share weights and states, so the order covers all of them.
    """

    plan: Plan
    inputs: dict[str, TensorType]
    params: dict[str, torch.Tensor]
    states: States
    sizes: dict[str, int]
    replays: bool

    @property
    def captured(self) -> Captured:
        """The CUDA graphs captured so far, with the seconds that each took; none on a CPU."""
        ...

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> StepHandle:
        """Start a step on the plan's inputs by name, which are on the host, and return its handle without waiting. The
        step updates the states. `watch`, if given, is called in place of each instruction, and returns its result.
        Raises StepMemoryError if the device has no memory for the step."""
        ...

    def warm_up(self) -> None:
        """Do the setup that the first steps would wait for, such as loading kernels. This changes no state, and weights
        need no values yet. Raises OptionError if there is no memory for the largest step."""
        ...

    def capture(self, rows: int) -> None:
        """Capture a CUDA graph for decode steps of `rows` sequences, unless there is one or no graph can hold them.
        Raises OptionError if there is no memory for the graph."""
        ...

    def capture_all(self) -> None:
        """Capture each CUDA graph that this executor may replay, if it does not exist yet. Raises OptionError if there
        is no memory for one."""
        ...

    def prepare(self, seconds: float = math.inf) -> bool:
        """Do one piece of preparation for later steps, such as a capture, while the host is idle for `seconds`. Running
        steps are not disturbed. Return False if nothing is left that fits into that time."""
        ...

    def synchronize(self) -> None:
        """Wait for all launched steps."""
        ...
