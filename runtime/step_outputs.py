"""The outputs of a step: which ones the host reads, and which part of each belongs to the step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ingot.ir.artifact.plan import Plan
from ingot.ir.features import find_ending
from ingot.ir.parse import parse_ending, parse_type
from ingot.runtime.step import StepSizes

# The output of an entry that pools.
VECTORS = "vectors"


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of a plan: the names that the host reads after every step (`read`), and the symbolic first dim (T, B
    or L) of each output that has one (`dims`)."""

    read: tuple[str, ...]
    dims: Mapping[str, str]

    @staticmethod
    def of(plan: Plan) -> "StepOutputs":
        fronts = {name: parse_type(text).shape[:1] for name, text in plan.outputs.items()}
        dims = {name: front[0] for name, front in fronts.items() if front and isinstance(front[0], str)}
        return StepOutputs(find_ending(parse_ending(plan.ending).name).read, dims)

    def cut(self, outputs: Mapping[str, torch.Tensor], step: StepSizes) -> dict[str, torch.Tensor]:
        """Return each output without the rows of padding."""
        return {name: value[: self.size(name, step)] if name in self.dims else value for name, value in outputs.items()}

    def size(self, name: str, step: StepSizes) -> int:
        """Return the size of an output's first dim in a step."""
        size: int = getattr(step, self.dims[name])
        return size
