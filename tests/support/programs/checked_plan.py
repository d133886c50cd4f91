"""A plan run by the letter: a value is there from the instruction that yields it to the one that frees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ingot.ir.artifact.plan import Argument, BucketPlan, DType, Instruction, Plan, Ref
from ingot.ir.interpret import interpret
from ingot.ir.program import Program
from ingot.ir.types import DTYPES
from ingot.runtime.loading.loaders import find_op


class PlanError(AssertionError):
    """What is wrong with a plan, by instruction."""


@dataclass
class CheckedPlanRun:
    """Runs steps of `program.plan`; regions are interpreted, in place of executables.

    Raises PlanError when an instruction reads what is not there (never made, or freed), makes a value twice or one that
    `values` does not list, frees what is not there, or when a value is left that is no output.
    """

    program: Program
    params: Mapping[str, torch.Tensor]
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    peak: int = 0

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plan = self.program.plan
        assert plan is not None
        (bucket,) = plan.buckets
        live: dict[str, Any] = dict(inputs)
        made: set[str] = set()
        for number, instruction in enumerate(bucket.instructions):
            self._run(plan, bucket, instruction, f"instruction {number}, {instruction.target}", live, made)
            self.peak = max(self.peak, sum(name in made for name in live))
        if missing := plan.outputs.keys() - live.keys():
            raise PlanError(f"no instruction yields the outputs {sorted(missing)}")
        if left := {name for name in live if name in made} - plan.outputs.keys():
            raise PlanError(f"nothing frees {sorted(left)}")
        if idle := bucket.values.keys() - made:
            raise PlanError(f"no instruction yields the values {sorted(idle)}")
        return {name: live[name] for name in plan.outputs}

    def _run(
        self, plan: Plan, bucket: BucketPlan, instruction: Instruction, where: str, live: dict[str, Any], made: set[str]
    ) -> None:
        def value(argument: Argument) -> Any:
            if isinstance(argument, Ref):
                for place in (live, self.params, self.states):
                    if argument.ref in place:
                        return place[argument.ref]
                raise PlanError(f"{where} reads '{argument.ref}', which is not there")
            if isinstance(argument, DType):
                return DTYPES[argument.dtype]
            return list(argument) if isinstance(argument, tuple) else argument

        args = [value(argument) for argument in instruction.args]
        kwargs = {name: value(argument) for name, argument in instruction.kwargs.items()}
        results = self._call(plan, instruction, args, kwargs)
        if not instruction.updates and len(results) != len(instruction.results):
            raise PlanError(f"{where} yields {len(results)} values, {len(instruction.results)} are named")
        for name, result in zip(instruction.results, results, strict=False):
            if not name:
                continue
            if name in made:
                raise PlanError(f"{where} makes '{name}' again")
            if name not in bucket.values:
                raise PlanError(f"{where} makes '{name}', which is not listed")
            live[name] = result
            made.add(name)
        for name in instruction.frees:
            if name not in made or name not in live:
                raise PlanError(f"{where} frees '{name}', which is not there")
            del live[name]

    def _call(self, plan: Plan, instruction: Instruction, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not instruction.target.startswith("exe."):
            result = find_op(instruction.target, instruction.backend)(*args, **kwargs)
            return result if isinstance(result, tuple) else (result,)
        wanted = plan.executables[instruction.target.removeprefix("exe.")]
        (region,) = (
            item for item in self.program.regions.values() if item.executable and item.executable.id == wanted.id
        )
        return tuple(interpret(region.body, dict(zip(region.body.input_types(), args, strict=True))).values())
