"""What runs a plan: the protocol of executors, and of the steps that they launch.

The executor of each device is a subclass, and only `ingot.runtime.loader` names it. Everyone else asks what stands
here: an engine that of `StepLauncher`, all others that of `Executor`.
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
    """A launched step as an engine sees it."""

    def finish(self) -> None:
        """Launch the ending of a step with late inputs, which have been filled in by now; nothing for other steps."""
        ...

    def tokens(self) -> list[int]:
        """The sampled token of each row of logits; waits for the step. -1 where the logits were not finite."""
        ...

    def rejected(self) -> list[int]:
        """Of each sequence, how many of the last tokens that it fed were not kept; asked only of steps that feed
        drafts."""
        ...

    def logprobs(self) -> StepLogprobs:
        """The log-probabilities that were asked for, by row of logits; asked only of steps that give some."""
        ...

    def vectors(self) -> torch.Tensor:
        """f32[B, N] on the host: the vector of each sequence; asked only of steps that pool. Waits for the step."""
        ...


class StepHandle(SampledStep, Protocol):
    """A launched step with all that it computes."""

    @property
    def bucket(self) -> str:
        """The name of the bucket class that serves it."""
        ...

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs by name, on the executor's device; waits for the step. They may be overwritten by the step that
        is launched next."""
        ...


class StepLauncher(Protocol):
    """What an engine asks of an executor, or of several that run in each step (`ingot.runtime.round`).

    Steps run in the order in which they are launched.
    """

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Start a step on these inputs (tensors by name, on the host) and return without waiting for it.

        Rows in `inputs.recounts` are counted anew in front of it.

        The inputs stay as they are until `tokens()` of this step has returned. Raises StepMemoryError when the device
        has no memory for the step; rows, pages and token counts of its sequences may then have been written.
        """
        ...


@dataclass(frozen=True)
class Captured:
    """The seconds that capturing each step took: of decode steps by sequences, and apart from these of those that read
    shared prefixes once; of steps that feed prompts by tokens and sequences."""

    decode: Mapping[int, float] = field(default_factory=dict)
    shared: Mapping[int, float] = field(default_factory=dict)
    prompts: Mapping[tuple[int, int], float] = field(default_factory=dict)


NOTHING_CAPTURED = Captured()


class Executor(StepLauncher, Protocol):
    """A plan bound to weights, executables and states on one device.

    plan      the entry's plan
    inputs    the types of a step's inputs by name
    params    the plan's weights by name, on the device
    states    the states of all entries, on the device
    sizes     load-time dims (`pages`, `R`, `S`)
    replays   whether steps may be replayed from captured graphs, whose instructions no `watch` sees

    Steps run in the order of their launches; executors of one artifact share weights and states, and run in the order
    of the launches of all of them.
    """

    plan: Plan
    inputs: dict[str, TensorType]
    params: dict[str, torch.Tensor]
    states: States
    sizes: dict[str, int]
    replays: bool

    @property
    def captured(self) -> Captured:
        """The steps that were captured so far; none on a CPU."""
        ...

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> StepHandle:
        """Start a step on `inputs`, the plan's by name on the host; states move on. `watch` runs the instructions, one
        by one. Raises as `StepLauncher.launch` does."""
        ...

    def warm_up(self) -> None:
        """Do what the first steps would wait for, where that changes no state. Weights may hold anything. Raises
        OptionError when there is no memory for the largest step."""
        ...

    def capture(self, rows: int) -> None:
        """Make sure that decode steps of `rows` sequences have a graph, where one can hold them. Raises OptionError
        when there is no memory for it."""
        ...

    def capture_all(self) -> None:
        """Make sure that every step has its graph that can have one. Raises OptionError when there is no memory."""
        ...

    def prepare(self, seconds: float = math.inf) -> bool:
        """Use up to so many seconds in which the host has nothing else to do for what later steps need; False when
        nothing is left to do in them. Nothing that runs is disturbed."""
        ...

    def synchronize(self) -> None:
        """Wait for all steps that were launched."""
        ...
