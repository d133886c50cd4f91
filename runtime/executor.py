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
    """A launched step as an engine sees it."""

    def finish(self) -> None:
        """Launch the ending of a step with late inputs, once they are filled. Do nothing for other steps."""
        ...

    def tokens(self) -> list[int]:
        """Wait for the step and return the sampled token of each row of logits; -1 for non-finite logits."""
        ...

    def rejected(self) -> list[int]:
        """Return, for each sequence, how many of its last fed tokens were rejected. Only for steps with drafts or
        denoised blocks."""
        ...

    def logprobs(self) -> StepLogprobs:
        """Return the requested log-probabilities, by row of logits. Only for steps that compute some."""
        ...

    def vectors(self) -> torch.Tensor:
        """Wait for the step and return the vector of each sequence, f32[B, N] on the host. Only for steps that pool."""
        ...


class StepHandle(SampledStep, Protocol):
    """A launched step with all of its outputs."""

    @property
    def bucket(self) -> str:
        """The name of the bucket class that serves the step."""
        ...

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs by name, on the executor's device; waits for the step. The next launched step may overwrite
        them."""
        ...


class StepLauncher(Protocol):
    """The part of an executor that an engine uses. Several executors may run in each step (`ingot.runtime.round`).

    Steps run in launch order.
    """

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Start a step on these inputs (tensors by name, on the host) and return without waiting for it.

        Before the step, recounts the tokens of the rows in `inputs.recounts`. The caller must not change the inputs
        until `tokens()` of this step has returned. Raises StepMemoryError if the device has no memory for the step;
        rows, pages and token counts of its sequences may then have been written.
        """
        ...


@dataclass(frozen=True)
class Captured:
    """The seconds that each graph capture took.

    decode    decode steps, by sequences
    shared    decode steps that read shared prefixes once, by sequences
    prompts   steps that prefill, by (tokens, sequences)
    """

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
    replays   whether steps may replay captured graphs; a `watch` does not see the instructions of a graph

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
        """The steps captured so far; none on a CPU."""
        ...

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> StepHandle:
        """Start a step on `inputs`, the plan's by name on the host. The step updates the states. With `watch`, each
        instruction runs through it. Raises as `StepLauncher.launch` does."""
        ...

    def warm_up(self) -> None:
        """Do the setup that the first steps would wait for. It changes no state, and weights need no values yet. Raises
        OptionError if there is no memory for the largest step."""
        ...

    def capture(self, rows: int) -> None:
        """Capture a graph for decode steps of `rows` sequences, if they have none and one can hold them. Raises
        OptionError if there is no memory for it."""
        ...

    def capture_all(self) -> None:
        """Capture every graph that can be captured and is not yet. Raises OptionError if there is no memory."""
        ...

    def prepare(self, seconds: float = math.inf) -> bool:
        """Prepare later steps for up to `seconds` of idle host time, without disturbing running steps. Return False if
        nothing is left that fits into that time."""
        ...

    def synchronize(self) -> None:
        """Wait for all launched steps."""
        ...
