"""The executor of a GPU: decode steps as captured graphs, all others by launching their instructions."""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

import torch

from ingot.ir.artifact.plan import BucketPlan, Plan
from ingot.ir.cache.groups import table_groups
from ingot.ir.errors import InternalError, OptionError, StepMemoryError
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.parse import parse_type
from ingot.runtime.binding import bound_params, choose_bucket, step_sizes
from ingot.runtime.bucket import Bucket, Executables, Libraries, Watch, bound_buckets
from ingot.runtime.cuda.decision import Decider, Decision
from ingot.runtime.cuda.graphs.captured import Graphs
from ingot.runtime.cuda.graphs.choice import Capture, GraphChoice
from ingot.runtime.cuda.graphs.memory import GraphMemory
from ingot.runtime.cuda.graphs.sizes import decode_steps, graph_arena, mixed_tokens, prompt_steps
from ingot.runtime.cuda.graphs.staging import PaddedInputs, to_device
from ingot.runtime.cuda.handle import CudaStepHandle, to_host
from ingot.runtime.executor import Captured, Executor
from ingot.runtime.late_step import LateStep
from ingot.runtime.states import States
from ingot.runtime.step import StepInputs, StepLayout, StepSizes
from ingot.runtime.step_outputs import StepOutputs
from ingot.runtime.token_counts import recount

# Tokens of padding that are fed before the first prompt comes, beside the most that a bucket class has: for other sizes
# cuBLAS has other code, which is loaded when it first runs. Usual prompts are near to one of these.
_WARMED = (128, 512, 2048)
# Inputs that a step's sizes are told by, and what a graph needs of them; a page table, if there is any, is one more.
_SIZED = frozenset({"tokens", "rows", "logit_rows", "q_lens"})


class CudaExecutor(Executor):
    """A plan, checked by `check_plan`, bound to weights, executables and states on a GPU.

    Arguments are those of `ingot.runtime.cpu.executor.CpuExecutor`, tensors on the device of `context`. Steps run on
    its stream, in the order of their launches; executors that share states have one context. `capture` says when decode
    steps are captured as graphs; "none": every step is launched instruction by instruction. With `strict` a graph is
    launched only where everything lies as it did when it was captured, and nothing holds what it overwrites.
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
    ) -> None:
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
        self._buckets = bound_buckets(plan, resident, executables, libraries)
        decode, prompts = ({}, {}) if capture == "none" else (decode_steps(plan), prompt_steps(plan, find_gpu()))
        self._layout, self._gives = StepLayout.of(frozenset(plan.inputs)), StepOutputs.of(plan)
        memory = GraphMemory(graph_arena({**decode, **prompts}), strict=strict)
        by_plan = {id(bucket.plan): bucket for bucket in self._buckets}

        def graphs(choice: GraphChoice, steps: Mapping[StepSizes, BucketPlan]) -> Graphs:
            buckets = {size: by_plan[id(served)] for size, served in steps.items()}
            watched = resident if strict else None
            return Graphs(choice, buckets, self._layout, self._gives, self.sizes, memory, self.device, watched)

        self._decider = Decider(plan, decode, prompts, capture)
        self._decode = graphs(self._decider.decode, decode)
        self._prompts = graphs(self._decider.prompts, prompts)
        self._by_name = {bucket.plan.bucket.name: bucket for bucket in self._buckets}
        self.replays = bool(decode or prompts)
        self._ahead = capture == "idle"
        self._unseen = mixed_tokens(plan, prompts)  # sizes that libraries have not set themselves up for

    @property
    def captured(self) -> Captured:
        return Captured(
            decode={size.B: seconds for size, seconds in self._decode.seconds.items() if not size.shares},
            shared={size.B: seconds for size, seconds in self._decode.seconds.items() if size.shares},
            prompts={(size.T, size.B): seconds for size, seconds in self._prompts.seconds.items()},
        )

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> CudaStepHandle | LateStep:
        """Start a step on `inputs`, which lie on the host, as this rank decides, and return without waiting for it.
        `watch` runs the instructions, one by one. Raises StepMemoryError when the GPU has no memory for it."""
        return self.execute(inputs, self.decide(inputs, watched=watch is not None), watch)

    def decide(self, inputs: Mapping[str, torch.Tensor], *, watched: bool = False) -> Decision:
        """Decide how a step on `inputs` is computed, by its sizes and the steps that this rank decided so far. A
        `watched` one runs its instructions one by one, and does not count. Nothing is launched or captured. Raises
        InternalError for a step that no bucket class holds."""
        step = self._sizes(inputs)
        if step is None:
            sizes = step_sizes(self.inputs, inputs, self.sizes)
            return Decision(choose_bucket(self._buckets, inputs, sizes).plan.bucket.name)
        most = int(inputs["q_lens"].max()) if step.T > step.B else 1  # a sequence feeds one at least
        if watched:
            return self._decider.without_graph(step, most)
        return self._decider.decide(step, most, self._decode.seconds, self._prompts.seconds)

    def execute(
        self, inputs: Mapping[str, torch.Tensor], decided: Decision, watch: Watch | None = None
    ) -> CudaStepHandle | LateStep:
        """Start a step on `inputs` as `decided`, by this rank or by another one of the same plan, and return without
        waiting for it. Raises as `launch` does, and InternalError for a decision that cannot be executed here."""
        try:
            with torch.cuda.stream(self._stream):
                recount(self.plan.states, self.states, inputs)
                return self._execute(inputs, decided, watch)
        except torch.OutOfMemoryError as error:
            said = ". ".join(str(error).split(". ")[:2])  # and then what the whole process holds
            tokens, sequences = (inputs[name].shape[0] for name in ("tokens", "q_lens"))
            raise StepMemoryError(
                f"no memory for a step of {tokens} tokens of {sequences} sequences: {said}"
            ) from error

    def _execute(
        self, inputs: Mapping[str, torch.Tensor], decided: Decision, watch: Watch | None
    ) -> CudaStepHandle | LateStep:
        rated = self._rates(inputs)
        step, padded = self._sizes(inputs), decided.sizes
        if decided.graph is not None:
            if step is None or padded is None or watch is not None:
                raise InternalError(f"no graph can replay the step that {decided} is executed for")
            graphs = self._decode if decided.graph == "decode" else self._prompts
            return graphs.launch(inputs, padded, step, rated=rated)
        return self._launched(inputs, step, decided, watch, rated)

    def _rates(self, inputs: Mapping[str, torch.Tensor]) -> bool:
        """Whether the step gives log-probabilities that a request asks for."""
        if "logprob_ids" not in self.plan.outputs:
            return False
        if isinstance(inputs, StepInputs):
            return inputs.rates
        return "num_logprobs" in inputs and bool((inputs["num_logprobs"] >= 0).any())

    def _launched(
        self,
        inputs: Mapping[str, torch.Tensor],
        step: StepSizes | None,
        decided: Decision,
        watch: Watch | None,
        rated: bool,
    ) -> CudaStepHandle | LateStep:
        """A step by its instructions, one by one."""
        padded = decided.sizes
        if (bucket := self._by_name.get(decided.bucket)) is None:
            raise InternalError(f"the plan has no bucket class '{decided.bucket}'", expected=", ".join(self._by_name))
        sizes = step_sizes(self.inputs, inputs, self.sizes)
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
                outputs = self._gives.cut(outputs, step)
            read = {name: to_host(outputs[name]) for name in self._gives.read}
            done = torch.cuda.Event()
            return CudaStepHandle(decided.bucket, outputs, lambda one: read[one].tolist(), done, rated=rated)

        if not (self._layout.late and isinstance(inputs, StepInputs)):
            return end()

        def end_late() -> CudaStepHandle:
            with torch.cuda.stream(self._stream):
                for one in self._layout.late:
                    late = to_device(inputs[one.name], self.device)
                    sent[one.name][: late.shape[0]].copy_(late)
                return end()

        return LateStep(decided.bucket, end_late)

    def capture(self, rows: int) -> None:
        """Make sure that decode steps of `rows` sequences have a graph, where one can hold them. Nothing that runs is
        disturbed. Raises OptionError when there is no memory for it."""
        with torch.cuda.stream(self._stream), self._said(f"a captured step of {rows} sequences"):
            self._decode.capture_for(rows)

    def capture_all(self) -> None:
        """Make sure that every step has its graph that can have one. Raises OptionError when there is no memory."""
        with torch.cuda.stream(self._stream), self._said("what is captured"):
            self._decode.capture_all()
            self._prompts.capture_all()

    def warm_up(self) -> None:
        """Run the classes of prompts on padding, which changes no state: code is loaded, libraries set themselves
        up, and the largest step gets its memory. The first prompt then waits for none of that. Weights may hold
        anything. Raises OptionError when there is no memory for the largest step."""
        with torch.cuda.stream(self._stream):
            for bucket in self._buckets:
                first, last = bucket.plan.bucket.tokens
                if bucket.plan.bucket.q_max is None:
                    for tokens in (last, *(size for size in _WARMED if first <= size < last)):
                        with self._said(f"a step of {tokens} tokens"):
                            self._run_padding(bucket, tokens)

    def _run_padding(self, bucket: Bucket, tokens: int) -> None:
        step = StepSizes(T=tokens, B=1 if "T" in self.plan.dims else tokens, L=1, P=1)
        inputs = PaddedInputs(self._layout, self._decider.padded(bucket.plan.bucket, step) or step)
        outputs = bucket.run(inputs.sent(self.device), {**self.sizes, **asdict(inputs.sizes)})
        for name in self._gives.read:
            to_host(outputs[name])
        if inputs.sizes.T in self._unseen:
            self._unseen.remove(inputs.sizes.T)

    def _run_unseen(self) -> bool:
        """Run the next size on padding that no step has had and no graph will hold, to its end."""
        if not self._unseen:
            return False
        tokens = self._unseen[0]
        self._run_padding(next(one for one in self._buckets if one.plan.bucket.holds(tokens, tokens)), tokens)
        self.synchronize()
        return True

    @contextmanager
    def _said(self, what: str) -> Iterator[None]:
        """Raises OptionError where there is no memory for what was set aside."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise OptionError(
                f"{what} has no memory: of {total} bytes on the GPU {free} are free",
                expected="what was set aside when the KV pages were counted",
                hint="end the process that takes it, ask for fewer KV pages, or give less memory",
            ) from error

    def prepare(self, seconds: float = math.inf) -> bool:
        """Use up to so many seconds in which the host has nothing else to do for what later steps need; False when
        nothing is left to do in them, or no memory to do it with. Nothing that runs is disturbed."""
        if not self._ahead:
            return False
        with torch.cuda.stream(self._stream):
            try:
                if self._decode.capture_next(seconds) or self._prompts.capture_next(seconds):
                    return True
                # Padding runs in front of the next step, so not while one is waited for.
                return math.isinf(seconds) and self._run_unseen()
            except torch.OutOfMemoryError:  # not asked for; a step that needs it will say so
                return False

    def synchronize(self) -> None:
        """Wait for all steps that were launched, those of other entries too: the stream is theirs as well."""
        self._stream.synchronize()

    def _sent(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The inputs on the device: by one copy where they are views of one buffer."""
        if not isinstance(inputs, StepInputs):
            return {name: value.to(self.device) for name, value in inputs.items()}
        return inputs.layout.views(to_device(inputs.flat, self.device), inputs.sizes)

    def _sizes(self, inputs: Mapping[str, torch.Tensor]) -> StepSizes | None:
        """The sizes of a step, as the plan sees them: an entry that is fed no tokens has one of each sequence. None
        where it is given less than a graph needs, as another entry than main may be."""
        if isinstance(inputs, StepInputs):
            step = inputs.sizes
        elif inputs.keys() >= _SIZED and ((groups := table_groups(inputs)) or "P" not in self.plan.dims):
            tokens, rows, logits = (inputs[name].shape[0] for name in ("tokens", "rows", "logit_rows"))
            pages = inputs[groups[0].page_table].shape[1] if groups else 0
            step = StepSizes(tokens, rows, logits, pages, inputs["sharing"].shape[0] if "sharing" in inputs else 1)
        else:
            return None
        return step if "T" in self.plan.dims else StepSizes(step.B, step.B, step.B, step.P)
