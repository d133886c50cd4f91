"""Run the executor in lock-step with the op references, to find the instruction with a wrong result.

Each instruction is checked on its actual inputs, so earlier errors do not matter and no bisection is needed. The first
instruction with right inputs and a wrong result is at fault.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ingot.debug.bisect.execution.one_call import (
    instruction_nodes,
    meaning,
    one_call,
    result_names,
    value_names,
    wrong_results,
)
from ingot.debug.bisect.execution.tensor_check import Wrong, copied, first_changed, same_bits
from ingot.ir.artifact.plan import Instruction, Ref
from ingot.ir.parse import parse_type
from ingot.ir.program import Program
from ingot.runtime.steps.bucket import Call
from ingot.runtime.steps.executor import Executor


@dataclass(frozen=True)
class Instructions:
    """A program and the calls that are instructions of its plan, in order: `nodes[3]` is the call of instruction 3."""

    program: Program

    @cached_property
    def names(self) -> dict[fx.Node, str]:
        return value_names(self.program)

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return instruction_nodes(self.program)

    @cached_property
    def alone(self) -> list[Program]:
        """Return a list of programs, one for each instruction. Each program holds only the call of this instruction."""
        return [one_call(self.program, node, self.names) for node in self.nodes]

    def results(self, number: int) -> tuple[str, ...]:
        return result_names(self.nodes[number], self.names)


@dataclass(frozen=True)
class Misstep:
    """A faulty instruction of an artifact's plan.

    step         the number of the step that ran
    bucket       the bucket class (a range of step sizes) of the step
    number       the number of the instruction in the plan
    node         the call of the instruction in its program
    alone        a program that holds only this call
    tensor       the name of the wrong tensor
    text         what is wrong
    stray        True if the instruction wrote into a tensor that it must not change
    executor     True if the instruction is right, but an input differs from the value that was computed for it
    inputs       the inputs of the instruction, by name; empty if they were not recorded
    results      the results that the instruction returned
    """

    step: int
    bucket: str
    number: int
    instruction: Instruction
    node: fx.Node
    alone: Program
    tensor: str
    text: str
    wrong: Wrong | None = None
    stray: bool = False
    executor: bool = False
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    results: Sequence[torch.Tensor] = field(default=(), repr=False)


def first_misstep(
    executor: Executor,
    programs: Mapping[str, Program],
    params: Mapping[str, torch.Tensor],
    steps: Sequence[Mapping[str, torch.Tensor]],
    swapped: Instruction | None = None,
) -> Misstep | None:
    """Run steps of an artifact and find the first instruction with wrong results. Return None if all instructions are
    right.

    Each instruction is compared with the op's reference implementation. States, such as KV caches, are filled with NaN
    or -1 first.

    `programs` maps bucket classes (ranges of step sizes) to the final programs of the compile. `params` maps names to
    the right weights. `steps` has the inputs of each step by name. `swapped` is an instruction known to be wrong. It is
    computed by the reference, and so are all instructions with its target and backend. This shows whether the rest is
    right.
    """
    calls = {name: Instructions(program) for name, program in programs.items()}
    found = _run(executor, calls, params, steps, swapped, everywhere=False)
    if found is None or not found.executor:
        return found
    # A weight or state has changed. To find the writer, compare all of them after each instruction.
    for name, weight in executor.params.items():
        if not same_bits(weight, params[name]):
            weight.copy_(params[name])
    return _run(executor, calls, params, steps, swapped, everywhere=True) or found


def _run(
    executor: Executor,
    calls: Mapping[str, Instructions],
    params: Mapping[str, torch.Tensor],
    steps: Sequence[Mapping[str, torch.Tensor]],
    swapped: Instruction | None,
    *,
    everywhere: bool,
) -> Misstep | None:
    for state in executor.states.values():
        state.fill_(float("nan") if state.is_floating_point() else -1)
    states = {name: copied(state) for name, state in executor.states.items()}
    for number, inputs in enumerate(steps):
        watched = _Watched(executor, calls, params, states, number, inputs, swapped, everywhere)
        try:
            executor.launch(inputs, watched)
        except Exception as error:
            if watched.last is None:  # not even the first instruction was reached
                raise
            watched.blame_last(error)
        if watched.misstep is not None:
            return watched.misstep
    return None


@dataclass
class _Watched:
    """Runs the instructions of one step and compares their results with the reference.

    The executor calls this object in place of each instruction. `states` maps names of states to their expected
    contents. `live` maps names to the tensors that the step has computed so far. `kept` has copies of these tensors,
    made when they were computed. With `everywhere`, all weights and states are compared after each instruction. This
    finds an instruction that writes to a wrong tensor.
    """

    executor: Executor
    calls: Mapping[str, Instructions]
    params: Mapping[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    step: int
    inputs: Mapping[str, torch.Tensor]
    swapped: Instruction | None
    everywhere: bool
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    misstep: Misstep | None = None
    last: Call | None = None

    def __post_init__(self) -> None:
        self.live = dict(self.inputs)
        self.kept = {name: copied(tensor) for name, tensor in self.inputs.items()}

    def __call__(self, call: Call) -> Any:
        self.last = call
        if self.misstep is not None:
            return call()
        arguments = zip(call.instruction.args, call.args, strict=True)
        given = {arg.ref: value for arg, value in arguments if isinstance(arg, Ref)}
        if not self._given_right(call, given):
            return call()
        inputs = {name: self._right(name) for name in given}
        try:
            with _poisoned():
                result = self._by_reference(call, given) if self._is_swapped(call.instruction) else call()
        except Exception as error:
            self._blame(call, inputs, "", f"it raises {type(error).__name__}: {error}")
            raise
        try:
            self._check_others(call, given, inputs)
            if self.misstep is None:
                self._check_results(call, given, inputs, result)
        except Exception as error:  # its result cannot be judged, or its reference rejects the inputs
            self._blame(call, inputs, "", f"its result cannot be judged: {type(error).__name__}: {error}")
            raise
        for name in call.instruction.frees:
            self.live.pop(name, None)
            self.kept.pop(name, None)
        return result

    def blame_last(self, error: Exception) -> None:
        """Record the last instruction that ran as faulty, because the step raised `error` after it.

        If an instruction was found faulty before, it stays the recorded one.
        """
        if self.misstep is None and self.last is not None:
            self._blame(self.last, {}, "", f"the step fails after it: {error}")

    def _is_swapped(self, instruction: Instruction) -> bool:
        other = self.swapped
        return other is not None and (other.target, other.backend) == (instruction.target, instruction.backend)

    def _by_reference(self, call: Call, given: Mapping[str, torch.Tensor]) -> Any:
        """Compute a call by the op's reference instead of its backend. Return a tensor or tuple, as the backend would.

        `given` maps names to the tensors that the call reads. Updated states are written into these tensors.
        """
        alone = self.calls[call.bucket.bucket.name].alone[call.number]
        results = meaning(alone, {name: copied(value) for name, value in given.items()}, exact=False)
        count = len(results) - len(call.instruction.updates)
        for name, state in zip(call.instruction.updates, results[count:], strict=True):
            given[name].copy_(state)
        return results[0] if count == 1 and not call.instruction.target.startswith("exe.") else results[:count]

    def _right(self, name: str) -> torch.Tensor:
        """Return the content that the tensor `name` should have now.

        The tensor is a computed value, a step input, a weight or a state. Raises KeyError for an unknown name.
        """
        for place in (self.kept, self.states, self.params):
            if name in place:
                return place[name]
        raise KeyError(name)

    def _given_right(self, call: Call, given: Mapping[str, torch.Tensor]) -> bool:
        for name, value in given.items():
            if not same_bits(value, self._right(name)):
                place = list(first_changed(value, self._right(name))) if value.shape == self._right(name).shape else ""
                text = f"its input '{name}' differs from the value that was made, from {place} on"
                self._blame(call, {}, name, text, executor=True)
                return False
        return True

    def _check_others(self, call: Call, given: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
        """Record the call as faulty if it wrote into a tensor that it must not change.

        `given` maps names to the tensors that the call reads. `inputs` maps these names to the right contents before
        the call.
        """
        for name, value in self._watched_tensors(given).items():
            if name not in call.instruction.updates and not same_bits(value, self._right(name)):
                place = list(first_changed(value, self._right(name)))
                reads = "which it only reads" if name in given else "which is not even its argument"
                self._blame(call, inputs, name, f"it writes into '{name}', {reads}, at {place}", stray=True)
                return

    def _watched_tensors(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        everywhere = {**self.executor.params, **self.executor.states} if self.everywhere else {}
        return {**everywhere, **given, **self.live}

    def _check_results(
        self, call: Call, given: Mapping[str, torch.Tensor], inputs: dict[str, torch.Tensor], result: Any
    ) -> None:
        calls = self.calls[call.bucket.bucket.name]
        names, alone = calls.results(call.number), calls.alone[call.number]
        updates = call.instruction.updates
        results = [result] if isinstance(result, torch.Tensor) else list(result or ())
        if len(results) + len(updates) != len(names):
            self._blame(
                call, inputs, names[0], f"it returns {len(results)} results, expected {len(names) - len(updates)}"
            )
            return
        for name, value in zip(names, results, strict=False):
            declared = call.bucket.values.get(name)
            problem = declared and parse_type(declared.type).mismatch(value, _sizes(self.executor, self.inputs))
            if problem:
                self._blame(call, inputs, name, f"'{name}' has {problem}", results=results)
                return
        updated = {name: copied(given[name]) for name in updates}
        if (wrong := wrong_results(alone, inputs, results, updated)) is not None:
            what = "the state " if wrong[0] in updates else ""
            self._blame(call, inputs, wrong[0], f"{what}'{wrong[0]}' is {wrong[1]}", wrong=wrong[1], results=results)
            return
        for name, value in zip(names, results, strict=False):
            if name:
                self.live[name], self.kept[name] = value, copied(value)
        self.states.update(updated)

    def _blame(
        self,
        call: Call,
        inputs: Mapping[str, torch.Tensor],
        tensor: str,
        text: str,
        wrong: Wrong | None = None,
        stray: bool = False,
        executor: bool = False,
        results: Sequence[torch.Tensor] = (),
    ) -> None:
        calls = self.calls[call.bucket.bucket.name]
        self.misstep = Misstep(
            step=self.step,
            bucket=call.bucket.bucket.name,
            number=call.number,
            instruction=call.instruction,
            node=calls.nodes[call.number],
            alone=calls.alone[call.number],
            tensor=tensor,
            text=text,
            wrong=wrong,
            stray=stray,
            executor=executor,
            inputs=dict(inputs),
            results=results,
        )


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Make torch fill new tensors, to find elements that a kernel does not write.

    Within the `with` block, new floating-point tensors hold NaN. Tensors of other dtypes hold their largest number.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about ops without a deterministic implementation do not matter here
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _sizes(executor: Executor, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    sizes = dict(executor.sizes)
    for name, value_type in executor.inputs.items():
        sizes.update(zip(value_type.shape, inputs[name].shape, strict=True))  # type: ignore[arg-type]  # numbers do no harm
    return sizes
