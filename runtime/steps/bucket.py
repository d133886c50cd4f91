"""The instructions of one bucket class, bound to weights, states and code: they turn a step's inputs into outputs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ingot.ir.artifact.plan import Argument, BucketPlan, DType, Instruction, Plan, Ref
from ingot.ir.errors import BackendError, InternalError, UserBackendError
from ingot.ir.parse import parse_type
from ingot.ir.types import DTYPES, TensorType
from ingot.runtime.loading.loaders import find_op

Executables = Mapping[str, Callable[..., Sequence[torch.Tensor]]]
Libraries = Mapping[str, Mapping[str, Callable[..., Any]]]


@dataclass(frozen=True)
class _Step:
    """One instruction of a compiled plan, ready to run: a function and its arguments. The values of a step are in a
    table; an index in the table stands for a value.

    run       the function
    args      positional arguments; None in place of a value of the table
    slots     (position in `args`, index in the table) for each of these values
    kwargs    keyword arguments
    results   the table index of each result; -1 if it is unused
    single    the function returns one value, not a sequence of values
    frees     the table indices to clear afterwards
    what      the name of the op or executable, for messages
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    slots: tuple[tuple[int, int], ...]  # (position among args, slot in the table)
    kwargs: dict[str, Any]
    results: tuple[int, ...]  # a slot for each result; -1 if it is unused
    single: bool
    frees: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class Call:
    """One call of an instruction, with its arguments, before it runs. A `Watch` (a debugging hook) gets it and may run
    it.

    bucket   the plan that has the instruction
    number   the index of the instruction in that plan
    args     positional arguments
    kwargs   keyword arguments
    """

    bucket: BucketPlan
    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    _run: Callable[..., Any]

    @property
    def instruction(self) -> Instruction:
        return self.bucket.instructions[self.number]

    def __call__(self) -> Any:
        """Run the instruction and return its result. An op returns one value or a tuple, a compiled region a list. An
        instruction that only updates states returns None."""
        return self._run(*self.args, **self.kwargs)


# Called instead of each instruction. Returns the instruction's result: `call()`, or a replacement.
Watch = Callable[[Call], Any]


class Bucket:
    """Runs the compiled instructions of one bucket class. A bucket class is a range of step sizes with one compiled
    plan.

    plan          the bucket class with its instructions
    resident      weights and states, by name. States are tensors that are kept between steps, such as KV caches
    inputs        the names of a step's inputs
    outputs       the names of the values that a step returns
    executables   the compiled functions, by executable id. Each computes one call, or several fused calls
    libraries     the kernel libraries: backend name -> op name -> function
    """

    def __init__(
        self,
        plan: BucketPlan,
        *,
        resident: Mapping[str, torch.Tensor],
        inputs: Collection[str],
        outputs: Collection[str],
        executables: Executables,
        libraries: Libraries,
    ) -> None:
        self.plan = plan
        names = [*resident, *inputs, *plan.values]
        self._slot = slot = {name: index for index, name in enumerate(names)}
        self._table: list[Any] = [None] * len(names)
        for name, tensor in resident.items():
            self._table[slot[name]] = tensor
        self._inputs = [(name, slot[name]) for name in inputs]
        self._outputs = [(name, slot[name]) for name in outputs]
        self._libraries = libraries
        self._types: dict[int, TensorType] = {slot[name]: parse_type(v.type) for name, v in plan.values.items()}
        self._steps = [self._bind(instruction, slot, executables) for instruction in plan.instructions]
        # The plan promises the types of all values; the first step of a bucket checks them.
        self._checked = False

    def _bind(
        self,
        instruction: Instruction,
        slot: Mapping[str, int],
        executables: Executables,
    ) -> _Step:
        run: Callable[..., Any]
        args: tuple[Argument, ...] = instruction.args
        kwargs: Mapping[str, Argument] = instruction.kwargs
        if instruction.calls is not None:
            run, single = executables[instruction.calls], False
            args, kwargs = tuple(arg for arg in args if isinstance(arg, Ref)), {}  # constants are compiled in
        else:
            library = self._libraries.get(instruction.backend)
            run = find_op(instruction.target, instruction.backend, library)
            single = len(instruction.results) == 1
        return _Step(
            run=run,
            args=tuple(None if isinstance(arg, Ref) else _constant(arg) for arg in args),
            slots=tuple((index, slot[arg.ref]) for index, arg in enumerate(args) if isinstance(arg, Ref)),
            kwargs={name: _constant(arg) for name, arg in kwargs.items()},
            results=tuple(slot[name] if name else -1 for name in instruction.results),
            single=single,
            frees=tuple(slot[name] for name in instruction.frees),
            what=instruction.target,
        )

    def run(
        self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int], watch: Watch | None = None
    ) -> dict[str, torch.Tensor]:
        """Run a step on `inputs`, and return its outputs by name. It runs the forward pass, then the ending, such as
        sampling.

        sizes   the size of every symbolic dim, by name
        watch   a debugging hook: called with each instruction in place of running it; returns the instruction's result
        """
        self.begin(inputs, sizes, watch)
        return self.end(sizes, watch)

    def rehearse(self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Run a step of padding, so that libraries prepare for its size. Its outputs mean nothing."""
        self.run(inputs, sizes)

    def begin(self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int], watch: Watch | None = None) -> None:
        """Run the first part of a step on `inputs`: the forward pass. The next call must be `end`, which runs the
        ending, such as sampling.

        sizes   the size of every symbolic dim, by name
        watch   a debugging hook: called with each instruction in place of running it; returns the instruction's result
        """
        table = self._table
        for name, index in self._inputs:
            table[index] = inputs[name]
        try:
            self._run_steps(sizes, watch, range(self.plan.ending))
        except BaseException:
            self._forget()
            raise

    def captured(self) -> Callable[[], None]:
        """Return a function to call each time that the graph captured just now has run. It does nothing here."""
        return lambda: None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the values that a step returns."""
        return tuple(name for name, _ in self._outputs)

    def value(self, name: str) -> torch.Tensor:
        """Return a value of the running step. It is there until an instruction frees it, or the step ends."""
        found: torch.Tensor = self._table[self._slot[name]]
        return found

    def set_value(self, name: str, value: torch.Tensor) -> None:
        """Set a value of the running step, which another pipeline stage has computed."""
        self._table[self._slot[name]] = value

    def end(
        self,
        sizes: Mapping[str, int],
        watch: Watch | None = None,
        before_end: Callable[[], None] = lambda: None,
    ) -> dict[str, torch.Tensor]:
        """Run the last part of the step that `begin` began, such as sampling. Return the step's outputs by name.

        sizes        the size of every symbolic dim, by name
        watch        a debugging hook: called with each instruction in place of running it; returns the instruction's
                     result
        before_end   called after the last instruction, while values are still there
        """
        try:
            self._run_steps(sizes, watch, range(self.plan.ending, len(self._steps)))
            before_end()
            self._checked = True
            return {name: self._table[index] for name, index in self._outputs}
        finally:
            self._forget()

    def _forget(self) -> None:
        for index in self._types:
            self._table[index] = None

    def _run_steps(self, sizes: Mapping[str, int], watch: Watch | None, numbers: range) -> None:
        table = self._table
        for number in numbers:
            step = self._steps[number]
            args = list(step.args)
            for place, index in step.slots:
                args[place] = table[index]
            try:
                if watch is None:
                    result = step.run(*args, **step.kwargs)
                else:
                    result = watch(Call(self.plan, number, tuple(args), step.kwargs, step.run))
            except torch.OutOfMemoryError:
                raise  # callers handle it; the instruction is not at fault
            except UserBackendError:
                raise  # it names the package
            except Exception as error:  # name the instruction, whatever a library raises
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
            result = None  # only the table holds values, so that memory is freed when the plan says
            if not self._checked:
                self._check(step, sizes)
            for index in step.frees:
                table[index] = None

    def _check(self, step: _Step, sizes: Mapping[str, int]) -> None:
        for index in step.results:
            if index >= 0 and (problem := self._types[index].mismatch(self._table[index], sizes)):
                raise InternalError(f"{step.what} yields {problem}", where=f"bucket class {self.plan.bucket.name}")


def bound_buckets(
    plan: Plan,
    resident: Mapping[str, torch.Tensor],
    executables: Executables,
    libraries: Libraries,
    kind: Callable[..., Bucket] = Bucket,
) -> list[Bucket]:
    """Return the plan's bucket classes, ready to run, in the plan's order. A bucket class is a range of step sizes with
    one compiled plan.

    resident      the weights and states, by name. States are tensors that are kept between steps, such as KV caches
    executables   the compiled functions, by executable id. Each computes one call, or several fused calls
    libraries     the kernel libraries: backend name -> op name -> function
    kind          what makes each, with the arguments of `Bucket`
    """
    return [
        kind(
            bucket,
            resident=resident,
            inputs=plan.inputs,
            outputs=plan.outputs,
            executables=executables,
            libraries=libraries,
        )
        for bucket in plan.buckets
    ]


def _constant(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        raise InternalError(f"a named argument refers to '{argument.ref}'", expected="a constant")
    if isinstance(argument, DType):
        return DTYPES[argument.dtype]
    return list(argument) if isinstance(argument, tuple) else argument
