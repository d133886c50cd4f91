"""The executor of a CPU: a step is complete when `launch` returns."""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ingot.ir.artifact.plan import Plan
from ingot.ir.parse import parse_type
from ingot.runtime.cpu.threads import on_threads
from ingot.runtime.engines.logprobs import OutputLogprobs
from ingot.runtime.loading.states import States
from ingot.runtime.scheduling.edited_rows import write_edits, write_masks
from ingot.runtime.steps.binding import bound_params, choose_bucket, step_sizes
from ingot.runtime.steps.bucket import Executables, Libraries, Watch, bound_buckets
from ingot.runtime.steps.executor import NOTHING_CAPTURED, Captured, Executor
from ingot.runtime.steps.late_step import LateStep
from ingot.runtime.steps.stage_line import StageLine, check_line
from ingot.runtime.steps.step import StepInputs
from ingot.runtime.steps.step_outputs import VECTORS
from ingot.runtime.steps.token_counts import recount


@dataclass(frozen=True)
class CpuStepHandle:
    """The handle of a completed step. `outputs` has its outputs by name. `bucket` is the name of its bucket class (a
    range of step sizes with one compiled plan)."""

    bucket: str
    outputs: dict[str, torch.Tensor]

    def finish(self) -> None:
        """Do nothing: the step is complete."""

    def tokens(self) -> list[int]:
        return [int(token) for token in self.outputs["tokens"].tolist()]

    def rejected(self) -> list[int]:
        return [int(count) for count in self.outputs["rejected"].tolist()]

    def logprobs(self) -> OutputLogprobs:
        return OutputLogprobs(self.outputs["logprob_ids"], self.outputs["logprobs"], self.outputs["ranks"])

    def vectors(self) -> torch.Tensor:
        return self.outputs[VECTORS]


class CpuExecutor(Executor):
    """Runs a plan on a CPU. `Executor` describes the arguments. If `states` is None, it allocates states. `line`
    reaches the other pipeline stages; None: the plan has none. Steps of many tokens run on `threads` threads of torch;
    None: on as many as torch has.

    Raises ArtifactError if a weight has another dtype, shape or strides than in the plan. Raises OptionError if there
    is no memory for the states.
    """

    captured: Captured = NOTHING_CAPTURED
    replays = False

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, torch.Tensor],
        executables: Executables,
        sizes: Mapping[str, int],
        libraries: Libraries | None = None,
        states: States | None = None,
        line: StageLine | None = None,
        threads: int | None = None,
    ) -> None:
        check_line(line, plan.stage is not None)
        self._threads = threads
        self.plan, self._line = plan, line
        self.sizes = dict(sizes)
        self.inputs = {name: parse_type(text) for name, text in plan.inputs.items()}
        self.states = States(plan.states, self.sizes) if states is None else states
        self.params = bound_params(plan, params, self.sizes)
        # A stage that later ones follow begins further steps before the ending of a step, whose values stay until then.
        lanes = range(1 if line is None else line.most_begun)
        resident = {**self.params, **self.states}
        self._lanes = deque([bound_buckets(plan, resident, executables, libraries or {}) for _ in lanes])

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> CpuStepHandle | LateStep:
        """Run a step on `inputs` and return its handle.

        Inputs are late if only the ending (such as sampling) reads them, and the host does not know them yet; so are
        the masks of grammars. With them, only the forward pass runs. The caller fills them and calls the handle's
        `finish`, which runs the ending. On each pipeline stage but the last, the ending waits in this way too: for the
        tokens of the last stage. Endings must run in the order of launches, and at most as many steps may wait for
        theirs as there are stages.

        watch   a debugging hook: called with each instruction in place of running it; returns the instruction's result
        """
        line = self._line
        sizes = step_sizes(self.inputs, inputs, self.sizes)
        if line is not None and (given := getattr(inputs, "sizes", None)) is not None:
            sizes = {**vars(given), **sizes}  # a stage may lack the inputs that show them
        bucket = choose_bucket(self._lanes[0], inputs, sizes)
        self._lanes.rotate(-1)
        recount(self.plan.states, self.states, inputs)
        write_edits(self.plan.states, self.states, inputs)
        # One thread is best for a step of few tokens. With several, every op waits for all of them (an OpenMP barrier).
        # On a busy machine, that can cost a time slice of the operating system.
        name, threads = bucket.plan.bucket.name, 1 if bucket.plan.bucket.few_tokens else self._threads
        with on_threads(threads):
            if line is not None:
                line.receive(bucket, sizes, late=False)
            began = time.perf_counter_ns()
            bucket.begin(inputs, sizes, watch)
            if line is not None:
                line.send(bucket, late=False)
            self.busy += time.perf_counter_ns() - began

        def end() -> CpuStepHandle:
            write_masks(self.plan.states, self.states, inputs)
            with on_threads(threads):
                if line is None:
                    return CpuStepHandle(name, bucket.end(sizes, watch))
                line.receive(bucket, sizes, late=True)
                began = time.perf_counter_ns()
                outputs = bucket.end(sizes, watch, partial(line.send, bucket, late=True))
                self.busy += time.perf_counter_ns() - began
                return CpuStepHandle(name, outputs)

        waits = len(self._lanes) > 1 or (isinstance(inputs, StepInputs) and inputs.ends_late)
        return LateStep(name, end) if waits else end()

    def warm_up(self) -> None:
        """Do nothing: on a CPU there is nothing to prepare before the first step."""

    def capture(self, rows: int) -> None:
        """Do nothing: there are no CUDA graphs on a CPU."""

    def capture_all(self) -> None:
        """Do nothing: there are no CUDA graphs on a CPU."""

    def prepare(self, seconds: float = math.inf) -> bool:
        """Do nothing and return False: on a CPU there is no work to do in advance."""
        return False

    def synchronize(self) -> None:
        """Do nothing: a step is complete when `launch` returns."""
