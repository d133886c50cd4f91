"""The outputs of a padded step: which ones the host reads, and which part of each belongs to the step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ingot.ir.artifact.plan import Plan
from ingot.ir.features import find_ending
from ingot.ir.parse import parse_ending, parse_type
from ingot.runtime.steps.step import StepSizes

# The output of an entry that pools.
VECTORS = "vectors"


@dataclass(frozen=True)
class StepOutputs:
    """Describes the outputs of a plan.

    read   the names of the outputs that the host reads after every step, such as the sampled tokens
    dims   name of an output -> its symbolic first dim: T (tokens), B (sequences) or L (rows of logits). Outputs of
           fixed size are left out
    """

    read: tuple[str, ...]
    dims: Mapping[str, str]

    @staticmethod
    def of(plan: Plan) -> "StepOutputs":
        fronts = {name: parse_type(text).shape[:1] for name, text in plan.outputs.items()}
        dims = {name: front[0] for name, front in fronts.items() if front and isinstance(front[0], str)}
        return StepOutputs(find_ending(parse_ending(plan.ending).name).read, dims)

    def cut(self, outputs: Mapping[str, torch.Tensor], step: StepSizes) -> dict[str, torch.Tensor]:
        """Return the outputs of a padded step, by name, without their rows of padding. `step` has the sizes before
        padding."""
        return {name: value[: self.size(name, step)] if name in self.dims else value for name, value in outputs.items()}

    def size(self, name: str, step: StepSizes) -> int:
        """Return the size of the first dim of the output `name` in a step of these sizes."""
        size: int = getattr(step, self.dims[name])
        return size
