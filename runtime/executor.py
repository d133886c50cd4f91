"""The executor: runs a plan's instructions over resident weights and states."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ingot.backends.reference.load import load_op
from ingot.ir.errors import ArtifactError, BackendError, InternalError
from ingot.ir.parse import parse_type
from ingot.ir.plan import Argument, BucketPlan, DType, Instruction, Plan, Ref
from ingot.ir.types import DTYPES, TensorType
from ingot.runtime.states import States


@dataclass(frozen=True)
class _Step:
    """An instruction bound to slots of the value table."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    slots: tuple[tuple[int, int], ...]  # (position among args, slot in the table)
    kwargs: dict[str, Any]
    results: tuple[int, ...]  # a slot each, -1 where nothing takes the result
    single: bool
    frees: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class Call:
    """An instruction that is about to run: the `number`th of its bucket class, on these arguments."""

    bucket: BucketPlan
    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    _run: Callable[..., Any]

    @property
    def instruction(self) -> Instruction:
        return self.bucket.instructions[self.number]

    def __call__(self) -> Any:
        """Run it. An op gives its result, or a tuple of several; a region a list; what only updates states, None."""
        return self._run(*self.args, **self.kwargs)


# Sees every instruction in place of its running, and gives what the instruction yields: `call()`, or something else.
Watch = Callable[[Call], Any]


@dataclass
class StepHandle:
    """A launched step, served by the bucket class `bucket`. On a CPU it has finished by then; `tokens` would wait for
    it on a device."""

    bucket: str
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def tokens(self) -> list[int]:
        """The sampled token of each row of logits; -1 where the logits were not finite."""
        return [int(token) for token in self.outputs["tokens"].tolist()]

    def logprobs(self) -> "OutputLogprobs":
        """The log-probabilities that were asked for, by row of logits."""
        return OutputLogprobs(self.outputs["logprob_ids"], self.outputs["logprobs"], self.outputs["ranks"])


@dataclass(frozen=True)
class OutputLogprobs:
    """What `top_logprobs` gives."""

    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor

    def row(self, index: int) -> tuple[list[int], list[float], int]:
        """Ids and log-probabilities of a row as far as they were asked for, the chosen token in front, and its rank."""
        ids = [token for token in self.ids[index].tolist() if token >= 0]
        return ids, self.values[index, : len(ids)].tolist(), int(self.ranks[index])


class Executor:
    """A plan, checked by `check_plan`, bound to one set of weights, executables and states on a CPU.

    `params`: every weight by name. `executables`: a loaded callable by executable id. `sizes`: load-time dims (`pages`,
    `S`). `libraries`: the ops of each provider that brought kernels. `states`: those that other entries share, which
    hold the plan's; its own by default. Raises ArtifactError when a weight does not fit the plan's dtype, shape or
    strides, OptionError when there is no memory for the states.
    """

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, torch.Tensor],
        executables: Mapping[str, Callable[..., Sequence[torch.Tensor]]],
        sizes: Mapping[str, int],
        libraries: Mapping[str, Mapping[str, Callable[..., Any]]] | None = None,
        states: States | None = None,
    ) -> None:
        self.plan = plan
        self.libraries = libraries or {}
        self.sizes = dict(sizes)
        self.inputs = {name: parse_type(text) for name, text in plan.inputs.items()}
        self.states = States(plan.states, self.sizes) if states is None else states
        for name, text in plan.params.items():
            if name not in params:
                raise ArtifactError(f"weight '{name}' is missing", where="weights.json", expected=text)
            if problem := parse_type(text).mismatch(params[name], self.sizes):
                raise ArtifactError(f"weight '{name}' has {problem}", where="weights.json against plan.json")
        self.params = {name: params[name] for name in plan.params}
        self._buckets = [_Bucket(bucket, self, executables) for bucket in plan.buckets]

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> StepHandle:
        """Run one step. `inputs` are the plan's, by name; states move on. `watch` runs the instructions, one by one."""
        sizes = dict(self.sizes)
        for name, value_type in self.inputs.items():
            if name not in inputs:
                raise InternalError(f"input '{name}' is missing", expected=str(value_type))
            for size, found in zip(value_type.shape, inputs[name].shape, strict=False):
                if isinstance(size, str):
                    sizes.setdefault(size, found)
            if problem := value_type.mismatch(inputs[name], sizes):
                raise InternalError(f"input '{name}' has {problem}")
        q_max = int(inputs["q_lens"].max()) if "q_lens" in inputs else sizes["T"]
        for bucket in self._buckets:
            if bucket.plan.bucket.holds(sizes["T"], q_max):
                with _threads(1 if bucket.plan.bucket.few_tokens else torch.get_num_threads()):
                    return StepHandle(bucket.plan.bucket.name, bucket.run(inputs, sizes, watch))
        raise InternalError(
            f"no bucket class holds a step of {sizes['T']} tokens, at most {q_max} of one sequence",
            expected=", ".join(f"{b.bucket.name}: {b.bucket.tokens}" for b in self.plan.buckets),
        )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch's own ops on `count` threads.

    A step of few tokens gives them little to share out, while OpenMP's barriers wait for every thread: on a machine
    with other work that is a scheduler's time slice for each op. Kernels of a library have threads of their own.
    """
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Bucket:
    """The instructions of one bucket class over a flat table of values."""

    def __init__(
        self, plan: BucketPlan, executor: Executor, executables: Mapping[str, Callable[..., Sequence[torch.Tensor]]]
    ) -> None:
        self.plan = plan
        names = [*executor.params, *executor.states, *executor.inputs, *plan.values]
        slot = {name: index for index, name in enumerate(names)}
        self._table: list[Any] = [None] * len(names)
        for name, tensor in [*executor.params.items(), *executor.states.items()]:
            self._table[slot[name]] = tensor
        self._inputs = [(name, slot[name]) for name in executor.inputs]
        self._outputs = [(name, slot[name]) for name in executor.plan.outputs]
        self._libraries = executor.libraries
        self._types: dict[int, TensorType] = {slot[name]: parse_type(v.type) for name, v in plan.values.items()}
        self._steps = [self._bind(instruction, slot, executables) for instruction in plan.instructions]
        # Types of what is passed on are the plan's promise; the first step of a bucket checks that all keep it.
        self._checked = False

    def _bind(
        self,
        instruction: Instruction,
        slot: Mapping[str, int],
        executables: Mapping[str, Callable[..., Sequence[torch.Tensor]]],
    ) -> _Step:
        run: Callable[..., Any]
        if instruction.target.startswith("exe."):
            run = executables[instruction.target.removeprefix("exe.")]
            single = False
        else:
            library = self._libraries.get(instruction.provider, {})
            run = library.get(instruction.target) or load_op(
                instruction.target, rowwise=instruction.provider == "rowwise"
            )
            single = len(instruction.results) == 1
        return _Step(
            run=run,
            args=tuple(None if isinstance(arg, Ref) else _constant(arg) for arg in instruction.args),
            slots=tuple((index, slot[arg.ref]) for index, arg in enumerate(instruction.args) if isinstance(arg, Ref)),
            kwargs={name: _constant(arg) for name, arg in instruction.kwargs.items()},
            results=tuple(slot[name] if name else -1 for name in instruction.results),
            single=single,
            frees=tuple(slot[name] for name in instruction.frees),
            what=instruction.target,
        )

    def run(
        self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int], watch: Watch | None
    ) -> dict[str, torch.Tensor]:
        table = self._table
        for name, index in self._inputs:
            table[index] = inputs[name]
        try:
            self._run_steps(sizes, watch)
            return {name: table[index] for name, index in self._outputs}
        finally:
            for index in self._types:
                table[index] = None

    def _run_steps(self, sizes: Mapping[str, int], watch: Watch | None) -> None:
        table = self._table
        for number, step in enumerate(self._steps):
            args = list(step.args)
            for place, index in step.slots:
                args[place] = table[index]
            try:
                if watch is None:
                    result = step.run(*args, **step.kwargs)
                else:
                    result = watch(Call(self.plan, number, tuple(args), step.kwargs, step.run))
            except Exception as error:  # whatever a library raises, one error says which instruction it was
                raise BackendError(
                    f"{step.what} failed: {type(error).__name__}: {error}",
                    where=f"bucket class {self.plan.bucket.name}",
                ) from error
            if step.single:
                table[step.results[0]] = result
            else:
                for place, index in enumerate(step.results):
                    if index >= 0:
                        table[index] = result[place]
            result = None  # the table alone holds values, so that memory goes when the plan says so
            if not self._checked:
                self._check(step, sizes)
            for index in step.frees:
                table[index] = None
        self._checked = True

    def _check(self, step: _Step, sizes: Mapping[str, int]) -> None:
        for index in step.results:
            if index >= 0 and (problem := self._types[index].mismatch(self._table[index], sizes)):
                raise InternalError(f"{step.what} yields {problem}", where=f"bucket class {self.plan.bucket.name}")


def _constant(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        raise InternalError(f"a named argument refers to '{argument.ref}'", expected="a constant")
    if isinstance(argument, DType):
        return DTYPES[argument.dtype]
    return list(argument) if isinstance(argument, tuple) else argument
