"""The executor of a GPU: it replays CUDA graphs for decode steps and many prompt steps, and launches the others."""

import math
from collections import ChainMap, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ingot.ir.artifact.plan import BucketPlan, Plan
from ingot.ir.cache.groups import table_groups
from ingot.ir.errors import InternalError, OptionError, StepMemoryError
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.parse import parse_type
from ingot.runtime.cuda.decision import Decider, Decision
from ingot.runtime.cuda.graphs.captured import Graphs
from ingot.runtime.cuda.graphs.choice import Capture, GraphChoice
from ingot.runtime.cuda.graphs.delayed import DelayedEndings, check_delayed
from ingot.runtime.cuda.graphs.memory import GraphMemory
from ingot.runtime.cuda.graphs.sizes import captured_together, decode_steps, graph_arena, mixed_tokens, prompt_steps
from ingot.runtime.cuda.graphs.staging import PaddedInputs, to_device
from ingot.runtime.cuda.handle import CudaStepHandle, to_host
from ingot.runtime.cuda.stage_clock import StageClock
from ingot.runtime.cuda.staged_bucket import StagedBucket
from ingot.runtime.loading.states import States
from ingot.runtime.scheduling.edited_rows import write_edits, write_masks
from ingot.runtime.steps.binding import bound_params, choose_bucket, step_sizes
from ingot.runtime.steps.bucket import Bucket, Executables, Libraries, Watch, bound_buckets
from ingot.runtime.steps.executor import Captured, Executor, StepHandle
from ingot.runtime.steps.late_step import LateStep
from ingot.runtime.steps.stage_line import StageLine, check_line
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes
from ingot.runtime.steps.step_outputs import StepOutputs
from ingot.runtime.steps.token_counts import recount

# Warm-up runs steps of so many padding tokens, besides the largest of each bucket class. cuBLAS has different kernels
# for different sizes, and loads each at first use. Usual prompts are near one of these sizes.
_WARMED = (128, 512, 2048)
# Inputs that determine a step's sizes, and that a graph needs, besides the page table, if any.
_SIZED = frozenset({"tokens", "rows", "logit_rows", "q_lens"})


@dataclass(frozen=True)
class GraphKinds:
    """The graphs of decode steps and of steps that prefill, and what chooses among them."""

    decider: Decider
    decode: Graphs
    prompts: Graphs


class CudaExecutor(Executor):
    """Runs a plan on a GPU. `Executor` describes the other arguments.

    context   the device of all tensors, and the CUDA stream on which steps run; executors that share states share one
              context
    capture   when to capture CUDA graphs; "none": launch all steps instruction by instruction
    strict    for debugging: make two checks before each replay of a graph. All tensors must be at the captured
              addresses. No caller may still hold an output that the replay overwrites
    stages    the plans of all pipeline stages; empty without stages. All capture graphs of the same sizes
    clock     of a pipeline stage: measure `busy`
    """

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, torch.Tensor],
        executables: Executables,
        sizes: Mapping[str, int],
        libraries: Libraries,
        states: States,
        context: LoadContext,
        *,
        capture: Capture = "need",
        strict: bool = False,
        stages: Sequence[Plan] = (),
        clock: bool = False,
    ) -> None:
        line = StageLine.of(context)
        check_line(line, plan.stage is not None)
        if line is not None and line.most_begun > 1:
            check_delayed(plan)
        self.plan = plan
        self.sizes = dict(sizes)
        self.inputs = {name: parse_type(text) for name, text in plan.inputs.items()}
        self.states = states
        self.params = bound_params(plan, params, self.sizes)
        if context.stream is None:
            raise InternalError("the load context of a GPU has no stream")
        self.device = context.device
        self._stream = context.stream
        resident = ChainMap(self.params, self.states)  # type: ignore[arg-type]  # nothing writes into it
        self._clock = StageClock(self.device) if clock and line is not None else None
        kind = Bucket if line is None else partial(StagedBucket, line=line, clock=self._clock)
        bound = partial(bound_buckets, plan, resident, executables, libraries, kind)
        self._buckets = bound()
        # On each pipeline stage but the last, the ending of a step waits for the tokens of the last stage.
        self._endings: DelayedEndings | None = None
        if line is not None and line.most_begun > 1:
            self._endings = DelayedEndings.next_to(self._stream, self.device, line.place, line.most_begun)
        # Steps without graphs keep their values until their endings, also while a graph is captured.
        lanes = [self._buckets] if self._endings is None else [bound() for _ in range(self._endings.most)]
        self._lanes = deque({one.plan.bucket.name: one for one in buckets} for buckets in lanes)
        decode, prompts = ({}, {}) if capture == "none" else _graph_steps(plan, stages)
        self._layout, self._step_outputs = StepLayout.of(frozenset(plan.inputs)), StepOutputs.of(plan)
        self._check = partial(_check_ranks, context)
        memory = GraphMemory(graph_arena({**decode, **prompts}), strict=strict, check=self._check)
        by_plan = {id(bucket.plan): bucket for bucket in self._buckets}

        def graphs(choice: GraphChoice, steps: Mapping[StepSizes, BucketPlan], apart: bool) -> Graphs:
            buckets = {size: by_plan[id(served)] for size, served in steps.items()}
            watched, outputs = resident if strict else None, self._step_outputs
            parts = choice, buckets, self._layout, outputs, self.sizes, memory, self.device, watched
            return Graphs(*parts, apart=apart, delayed=self._endings)

        def kinds(*, apart: bool) -> GraphKinds:
            decider = Decider(plan, decode, prompts, capture)
            return GraphKinds(decider, graphs(decider.decode, decode, apart), graphs(decider.prompts, prompts, apart))

        self._whole = kinds(apart=False)
        # For steps with grammars, whose endings wait for masks. They are captured only if there are such steps.
        self._apart = kinds(apart=True)
        self._masked = False  # whether there was such a step
        self.replays = bool(decode or prompts)
        self._ahead = capture == "idle"
        self._unseen = mixed_tokens(plan, prompts)  # sizes that libraries have not initialized for

    @property
    def captured(self) -> Captured:
        decode, prompts = self._whole.decode.seconds, self._whole.prompts.seconds
        return Captured(
            decode={size.B: seconds for size, seconds in decode.items() if not size.shares},
            shared={size.B: seconds for size, seconds in decode.items() if size.shares},
            prompts={(size.T, size.B): seconds for size, seconds in prompts.items()},
        )

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> CudaStepHandle | LateStep:
        """Start a step on `inputs`, which are on the host, and return its handle without waiting. If some inputs are
        known only later, the handle is a LateStep. The caller then fills these inputs and calls its `finish`. On each
        pipeline stage but the last, all handles are LateSteps: the ending waits for the tokens of the last stage.
        Endings must run in the order of launches, and at most as many steps may wait for theirs as there are stages.

        watch   a debugging hook: called with each instruction in place of running it; returns the instruction's result

        Raises StepMemoryError if the GPU has no memory for the step.
        """
        return self.execute(inputs, self.decide(inputs, watched=watch is not None), watch)

    def decide(self, inputs: Mapping[str, torch.Tensor], *, watched: bool = False) -> Decision:
        """Decide how to compute a step on `inputs`, without launching or capturing anything. The decision says which
        sizes to pad to, and which CUDA graph replays the step, if any. It depends on the sizes of this step and of
        earlier steps.

        watched   the step has a debugging hook: it runs its instructions one by one, and later decisions do not depend
                  on it

        Raises InternalError if the step is too large for every bucket class (range of step sizes with one compiled
        plan).
        """
        step = self._sizes(inputs)
        if step is None:
            sizes = step_sizes(self.inputs, inputs, self.sizes)
            return Decision(choose_bucket(self._buckets, inputs, sizes).plan.bucket.name)
        most = int(inputs["q_lens"].max()) if step.T > step.B else 1  # each sequence has at least one token
        kinds = self._kinds(inputs)
        if watched:
            return kinds.decider.without_graph(step, most)
        return kinds.decider.decide(step, most, kinds.decode.seconds, kinds.prompts.seconds)

    def execute(
        self, inputs: Mapping[str, torch.Tensor], decided: Decision, watch: Watch | None = None
    ) -> CudaStepHandle | LateStep:
        """Start a step on `inputs`, which are on the host, and return its handle without waiting. If some inputs are
        known only later, the handle is a LateStep. The caller then fills these inputs and calls its `finish`.

        decided   how to compute the step; another rank (device) with the same plan may have decided it
        watch     a debugging hook: called with each instruction in place of running it; returns the instruction's
                  result

        Raises StepMemoryError if the GPU has no memory for the step. Raises InternalError if the decision does not fit
        the step or the plan.
        """
        try:
            with torch.cuda.stream(self._stream):
                recount(self.plan.states, self.states, inputs)
                write_edits(self.plan.states, self.states, inputs)
                prepared = isinstance(inputs, StepInputs) and not inputs.ends_late
                if self._endings is None and prepared:
                    write_masks(self.plan.states, self.states, inputs)
                handle = self._execute(inputs, decided, watch)
                if self._clock is not None:
                    self.busy = self._clock.busy
                if self._endings is None and prepared:
                    handle.finish()  # a graph with an ending of its own: the next step overwrites what it reads
                begun = None if self._endings is None else self._endings.begun()
        except torch.OutOfMemoryError as error:
            said = ". ".join(str(error).split(". ")[:2])  # the rest describes the whole process
            tokens, sequences = (inputs[name].shape[0] for name in ("tokens", "q_lens"))
            raise StepMemoryError(
                f"no memory for a step of {tokens} tokens of {sequences} sequences: {said}"
            ) from error
        if self._endings is not None and begun is not None:
            return LateStep(handle.bucket, partial(self._end_delayed, self._endings, begun, inputs, handle))
        if not (isinstance(inputs, StepInputs) and inputs.waits_for_masks and inputs.ends_late):
            return handle
        self._masked = True

        def end() -> StepHandle:
            with torch.cuda.stream(self._stream):
                write_masks(self.plan.states, self.states, inputs)
            handle.finish()
            return handle

        return LateStep(handle.bucket, end)

    def _end_delayed(
        self,
        endings: DelayedEndings,
        begun: torch.cuda.Event,
        inputs: Mapping[str, torch.Tensor],
        handle: CudaStepHandle | LateStep,
    ) -> StepHandle:
        """Launch the ending of a step whose forward pass is over with `begun`."""
        with endings.after(begun):
            write_masks(self.plan.states, self.states, inputs)
            handle.finish()
        return handle

    def _kinds(self, inputs: Mapping[str, torch.Tensor]) -> "GraphKinds":
        """Return the graphs for steps with these inputs."""
        masked = isinstance(inputs, StepInputs) and inputs.waits_for_masks and inputs.ends_late
        return self._apart if masked and self._endings is None else self._whole

    def _execute(
        self, inputs: Mapping[str, torch.Tensor], decided: Decision, watch: Watch | None
    ) -> CudaStepHandle | LateStep:
        returns_logprobs = self._returns_logprobs(inputs)
        step, padded = self._sizes(inputs), decided.sizes
        if decided.graph is not None:
            if step is None or padded is None or watch is not None:
                raise InternalError(f"no graph can replay the step of {decided}")
            kinds = self._kinds(inputs)
            graphs = kinds.decode if decided.graph == "decode" else kinds.prompts
            return graphs.launch(inputs, padded, step, returns_logprobs=returns_logprobs)
        return self._launched(inputs, step, decided, watch, returns_logprobs)

    def _returns_logprobs(self, inputs: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a request needs log-probabilities from the step with these inputs."""
        if "logprob_ids" not in self.plan.outputs:
            return False
        if isinstance(inputs, StepInputs):
            return inputs.returns_logprobs
        return "num_logprobs" in inputs and bool((inputs["num_logprobs"] >= 0).any())

    def _launched(
        self,
        inputs: Mapping[str, torch.Tensor],
        step: StepSizes | None,
        decided: Decision,
        watch: Watch | None,
        returns_logprobs: bool,
    ) -> CudaStepHandle | LateStep:
        """Launch the instructions of a step one by one, without a CUDA graph, and return the step's handle. If some
        inputs are filled only later, it is a LateStep.

        inputs             the step's inputs on the host, by name
        step               the sizes of the step; None if the inputs do not show all of them
        decided            the bucket class (range of step sizes with one compiled plan), and the sizes to pad to
        watch              a debugging hook: called with each instruction in place of running it; returns the
                           instruction's result
        returns_logprobs   copy log-probabilities to the host
        """
        padded = decided.sizes
        if (bucket := self._lanes[0].get(decided.bucket)) is None:
            known = ", ".join(self._lanes[0])
            raise InternalError(f"the plan has no bucket class '{decided.bucket}'", expected=known)
        self._lanes.rotate(-1)
        sizes = step_sizes(self.inputs, inputs, self.sizes)
        if isinstance(inputs, StepInputs):
            sizes = {**asdict(inputs.sizes), **sizes}  # a stage may lack the inputs that show them
        given = None
        if step is None or padded is None:
            sent = self._sent(inputs)
        else:
            given = PaddedInputs(self._layout, padded)
            given.fill(inputs)
            sent, sizes = given.sent(self.device), {**sizes, **asdict(given.sizes)}
        bucket.begin(sent, sizes, watch)

        def end() -> CudaStepHandle:
            outputs = bucket.end(sizes, watch)
            if given is not None and step is not None:
                outputs = self._step_outputs.cut(outputs, step)
            read = {name: to_host(outputs[name]) for name in self._step_outputs.read}
            done = torch.cuda.Event()
            parts = decided.bucket, outputs, lambda one: read[one].tolist(), done
            return CudaStepHandle(*parts, returns_logprobs=returns_logprobs, check=self._check)

        late = isinstance(inputs, StepInputs) and inputs.ends_late
        if not late and self._endings is None:
            return end()
        stream = self._stream if self._endings is None else self._endings.stream

        def end_late() -> CudaStepHandle:
            with torch.cuda.stream(stream):
                for one in self._layout.late if late else ():
                    filled = to_device(inputs[one.name], self.device)
                    sent[one.name][: filled.shape[0]].copy_(filled)
                return end()

        return LateStep(decided.bucket, end_late)

    def capture(self, rows: int) -> None:
        """Capture a CUDA graph for decode steps of batch size `rows`. Do nothing if the graph exists, or if no graph
        can run such steps. Running steps are not disturbed. Raises OptionError if there is no memory for the graph."""
        with torch.cuda.stream(self._stream), self._memory_errors(f"a captured step of {rows} sequences"):
            self._whole.decode.capture_for(rows)

    def capture_all(self) -> None:
        """Capture all CUDA graphs that steps may replay and that do not exist yet. Raises OptionError if there is no
        memory for one."""
        with torch.cuda.stream(self._stream), self._memory_errors("the captured graphs"):
            self._whole.decode.capture_all()
            self._whole.prompts.capture_all()

    def warm_up(self) -> None:
        """Run prompt steps of padding tokens, so that the first prompt does not wait for setup.

        This loads kernels, initializes libraries and allocates memory for the step of most tokens and sequences. KV
        caches and other states do not change, and the weights need not be loaded yet. Raises OptionError if there is no
        memory for that step.
        """
        with torch.cuda.stream(self._stream):
            for bucket in self._buckets:
                first, last = bucket.plan.bucket.tokens
                if bucket.plan.bucket.q_max is None:
                    most = min(last, self.plan.dims.get("B", (1, 1))[1])  # a row of logits for each sequence
                    for tokens, rows in ((last, most), *((size, 1) for size in _WARMED if first <= size < last)):
                        with self._memory_errors(f"a step of {tokens} tokens"):
                            self._run_padding(bucket, tokens, rows)

    def _run_padding(self, bucket: Bucket, tokens: int, rows: int = 1) -> None:
        """Run a step of `tokens` padding tokens, of `rows` sequences if the program takes tokens."""
        step = StepSizes(T=tokens, B=rows, L=rows, P=1) if "T" in self.plan.dims else StepSizes(tokens, tokens, 1, 1)
        inputs = PaddedInputs(self._layout, self._whole.decider.padded(bucket.plan.bucket, step) or step)
        outputs = bucket.run(inputs.sent(self.device), {**self.sizes, **asdict(inputs.sizes)})
        for name in self._step_outputs.read:
            to_host(outputs[name])
        if inputs.sizes.T in self._unseen:
            self._unseen.remove(inputs.sizes.T)

    def _run_unseen(self) -> bool:
        """Run one step of padding tokens, so that libraries prepare for its size, and wait for it. No step has had that
        size, and no CUDA graph can replay it. Return False if no such size is left."""
        if not self._unseen:
            return False
        tokens = self._unseen[0]
        self._run_padding(next(one for one in self._buckets if one.plan.bucket.holds(tokens, tokens)), tokens)
        self.synchronize()
        return True

    @contextmanager
    def _memory_errors(self, what: str) -> Iterator[None]:
        """Turn an out-of-memory error inside the `with` block into an OptionError. `what` names in the error what
        needed the memory. The error means that another process took memory that was reserved."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise OptionError(
                f"there is no memory for {what}: of {total} bytes on the GPU {free} are free",
                expected="the memory that was reserved when the KV pages were counted",
                hint="end the process that uses it, serve with fewer KV pages, or let serving use less memory",
            ) from error

    def prepare(self, seconds: float = math.inf) -> bool:
        """Do one piece of work for later steps while the host is idle: capture a CUDA graph, or initialize libraries
        for one step size. Running steps are not disturbed.

        `seconds` is how long the host is idle. Return False if no work is left that fits into this time, or if memory
        is short.
        """
        if not self._ahead:
            return False
        with torch.cuda.stream(self._stream):
            try:
                for kinds in (self._whole, self._apart) if self._masked else (self._whole,):
                    if kinds.decode.capture_next(seconds) or kinds.prompts.capture_next(seconds):
                        return True
                # The padding step would delay the next step, so run it only when the engine is idle.
                return math.isinf(seconds) and self._run_unseen()
            except torch.OutOfMemoryError:  # optional work; a step that needs the memory will report it
                return False

    def synchronize(self) -> None:
        """Wait for all launched steps. These include steps of other executors on the same CUDA stream, such as a draft
        model's."""
        self._stream.synchronize()

    def _sent(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Start to copy the inputs of a step to the GPU, and return the copies by name. If the inputs are views of one
        buffer, this is a single copy."""
        if not isinstance(inputs, StepInputs):
            return {name: value.to(self.device) for name, value in inputs.items()}
        return inputs.layout.views(to_device(inputs.flat, self.device), inputs.sizes)

    def _sizes(self, inputs: Mapping[str, torch.Tensor]) -> StepSizes | None:
        """Return the sizes of a step: tokens, sequences, rows of logits, pages. A program without tokens has all of
        them but the pages equal to the number of sequences.

        Return None if `inputs` does not show these sizes, as in some programs other than the main model.
        """
        if isinstance(inputs, StepInputs):
            step = inputs.sizes
        elif inputs.keys() >= _SIZED and ((groups := table_groups(inputs)) or "P" not in self.plan.dims):
            tokens, rows, logits = (inputs[name].shape[0] for name in ("tokens", "rows", "logit_rows"))
            pages = inputs[groups[0].page_table].shape[1] if groups else 0
            step = StepSizes(tokens, rows, logits, pages, inputs["sharing"].shape[0] if "sharing" in inputs else 1)
        else:
            return None
        return step if "T" in self.plan.dims else StepSizes(step.B, step.B, step.B, step.P)


def _graph_steps(plan: Plan, stages: Sequence[Plan]) -> tuple[dict[StepSizes, BucketPlan], dict[StepSizes, BucketPlan]]:
    """Return the decode steps and the prompt steps that can be captured as CUDA graphs: sizes -> instructions.

    `stages` are the plans of all pipeline stages, which capture the same sizes.
    """
    gpu = find_gpu()
    decode = captured_together(decode_steps(plan), map(decode_steps, stages))
    return decode, captured_together(prompt_steps(plan, gpu), [prompt_steps(one, gpu) for one in stages])


def _check_ranks(context: LoadContext) -> None:
    """Raise RankError if the connections to other ranks have ended. Kernels that use them must not be launched then,
    and what they computed is not valid."""
    for one in context.communicators.values():
        one.check()
