"""What a step gives: which outputs the host reads, and how much of each belongs to the step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ingot.ir.artifact.plan import Plan
from ingot.ir.features import find_ending
from ingot.ir.parse import parse_ending, parse_type
from ingot.runtime.step import StepSizes

# What an entry that pools gives.
VECTORS = "vectors"


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of a plan: `read` by the host after every step, and by name the dim that stands in front (T, B or L),
    where one does."""

    read: tuple[str, ...]
    dims: Mapping[str, str]

    @staticmethod
    def of(plan: Plan) -> "StepOutputs":
        fronts = {name: parse_type(text).shape[:1] for name, text in plan.outputs.items()}
        dims = {name: front[0] for name, front in fronts.items() if front and isinstance(front[0], str)}
        return StepOutputs(find_ending(parse_ending(plan.ending).name).read, dims)

    def cut(self, outputs: Mapping[str, torch.Tensor], step: StepSizes) -> dict[str, torch.Tensor]:
        """The part of each output that is the step's own, where the step was filled up to more."""
        return {name: value[: self.size(name, step)] if name in self.dims else value for name, value in outputs.items()}

    def size(self, name: str, step: StepSizes) -> int:
        """How many values an output with a dim in front has in a step."""
        size: int = getattr(step, self.dims[name])
        return size
