"""The protocols of executors, which run plans, and of the steps that they launch.

Each device has an executor, a subclass that only `ingot.runtime.loading.loader` names. All other code uses these
protocols: an engine uses `StepLauncher`, all others use `Executor`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ingot.ir.artifact.plan import Plan
from ingot.ir.types import TensorType
from ingot.runtime.engines.logprobs import StepLogprobs
from ingot.runtime.loading.states import States
from ingot.runtime.steps.bucket import Watch
from ingot.runtime.steps.step import StepInputs


class SampledStep(Protocol):
    """The handle of a launched step, with the results that an engine reads: tokens, log-probabilities, vectors."""

    def finish(self) -> None:
        """Launch the last part of the step, such as sampling, if it waits for late inputs. Late inputs are those that
        the host fills after the launch. The caller must have filled them. Do nothing for other steps."""
        ...

    def tokens(self) -> list[int]:
        """Wait for the step and return the sampled token of each row of logits. -1 means that the logits were not
        finite."""
        ...

    def rejected(self) -> list[int]:
        """Wait for the step and return, for each sequence, how many of its last tokens in the step were rejected. Only
        for steps with draft tokens or block diffusion."""
        ...

    def logprobs(self) -> StepLogprobs:
        """Wait for the step and return its log-probabilities; `row(i)` of the result has those of row i of logits. Only
        for steps in which a request needs log-probabilities."""
        ...

    def vectors(self) -> torch.Tensor:
        """Wait for the step and return the pooled vector (embedding) of each sequence, f32[B, N] on the host. Only for
        steps of pooling models."""
        ...


class StepHandle(SampledStep, Protocol):
    """The handle of a launched step, with all its outputs on the device. Engines need only `SampledStep`; debugging
    tools read all outputs."""

    @property
    def bucket(self) -> str:
        """The name of the bucket class that runs the step. A bucket class is a range of step sizes with one compiled
        plan."""
        ...

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs by name, on the executor's device. Reading this waits for the step. The next launch may overwrite
        the outputs."""
        ...


class StepLauncher(Protocol):
    """Launches the steps of an engine, in launch order. An executor is a StepLauncher. A `Round` is one too: it
    launches several executors in each step, such as a model's and its draft model's."""

    def launch(self, inputs: StepInputs) -> SampledStep:
        """Start a step on `inputs`, which are on the host, and return its handle without waiting. The caller must not
        change the inputs until `tokens()` of this step has returned.

        The device's token counts, which penalties use, are first recomputed for the sequences in `inputs.recounts`, and
        the logit edits in `inputs.edits` are written. Raises StepMemoryError if the device has no memory for the step.
        Parts of the caches and token counts of its sequences may then be overwritten.
        """
        ...


@dataclass(frozen=True)
class Captured:
    """The CUDA graphs captured so far. Each mapping has the seconds that the capture of a graph took.

    decode    batch size -> seconds, for graphs of decode steps
    shared    batch size -> seconds, for graphs of decode steps with cascade attention (a shared prefix is read once)
    prompts   (tokens, sequences) -> seconds, for graphs of prompt steps
    """

    decode: Mapping[int, float] = field(default_factory=dict)
    shared: Mapping[int, float] = field(default_factory=dict)
    prompts: Mapping[tuple[int, int], float] = field(default_factory=dict)


NOTHING_CAPTURED = Captured()


class Executor(StepLauncher, Protocol):
    """Runs one compiled program, such as the model or its draft model, on one device. Steps run in launch order, also
    across the executors of one artifact. Each subclass (for a CPU, for a GPU) takes the arguments below.

    plan          the compiled program, which `check_plan` has checked
    params        the weights by name, on the device; the attribute has only those that the plan uses
    executables   (argument) the compiled functions, by executable id; each computes one call, or several fused calls
    sizes         the symbolic dims that are known at load time: `pages`, `R` (maximum running sequences), `S` (slots of
                  convolution and scan states)
    libraries     (argument) the kernel libraries: backend name -> op name -> function
    states        KV caches and other tensors that are kept between steps, by name; the executors of one artifact share
                  them
    inputs        (attribute) name -> type of each input of a step
    replays       (attribute) whether steps may replay CUDA graphs; a `watch` does not see their instructions
    busy          (attribute) the nanoseconds that it has computed, without those in which it waited for other pipeline
                  stages; on a GPU only of a pipeline stage, if it was asked for, and late by a few steps
    """

    plan: Plan
    inputs: dict[str, TensorType]
    params: dict[str, torch.Tensor]
    states: States
    sizes: dict[str, int]
    replays: bool
    busy: int = 0

    @property
    def captured(self) -> Captured:
        """The CUDA graphs captured so far, with the seconds that each capture took; empty on a CPU."""
        ...

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> StepHandle:
        """Start a step on `inputs`, and return its handle without waiting. `inputs` are on the host, by name. The step
        updates KV caches and other states.

        watch   a debugging hook: called with each instruction in place of running it; returns the instruction's result

        Raises StepMemoryError if the device has no memory for the step.
        """
        ...

    def warm_up(self) -> None:
        """Do the setup that the first steps would wait for, such as loading kernels. States do not change, and the
        weights need not be loaded yet. Raises OptionError if there is no memory for the largest step."""
        ...

    def capture(self, rows: int) -> None:
        """Capture a CUDA graph for decode steps of batch size `rows`. Do nothing if the graph exists, or if no graph
        can run such steps. Raises OptionError if there is no memory for the graph."""
        ...

    def capture_all(self) -> None:
        """Capture all CUDA graphs that steps may replay and that do not exist yet. Raises OptionError if there is no
        memory for one."""
        ...

    def prepare(self, seconds: float = math.inf) -> bool:
        """Do one piece of work for later steps while the host is idle, such as the capture of a CUDA graph. Running
        steps are not disturbed.

        `seconds` is how long the host is idle. Return False if no work is left that fits into this time.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all launched steps."""
        ...
