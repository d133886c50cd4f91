"""Where a faulty compile first parts from a healthy one: an independent look at each fault's truth."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.ir.mesh import ranks
from ingot.ir.text import print_program
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.load_context import mesh_of
from ingot.runtime.loading.weights import map_weights
from planted.fault import Truth
from planted.in_passes import Application


@dataclass(frozen=True)
class Place:
    """`traced`: the traced program differs. `pass_name`, `bucket`: the first pass that leaves another program. Then
    the weights that differ, and whether the plan does."""

    traced: bool
    pass_name: str | None
    bucket: str | None
    weights: frozenset[str]
    plan: bool

    def fits(self, truth: Truth) -> bool:
        """Whether this is where a fault of that truth shows first, and nowhere before."""
        same_program = not self.traced and self.pass_name is None
        match truth.kind:
            case "definition":
                return self.traced
            case "pass":
                return not self.traced and (self.pass_name, self.bucket) == (truth.blamed, truth.bucket)
            case "recipe" | "weights":
                return same_program and not self.plan and bool(self.weights) and self.weights <= set(truth.nodes)
            case "plan":
                return same_program and not self.weights and self.plan
        return same_program and not self.weights and not self.plan


def where(healthy: Path, of_healthy: Sequence[Application], faulty: Path, of_faulty: Sequence[Application]) -> Place:
    traced = print_program(of_healthy[0].before) != print_program(of_faulty[0].before)
    for one, other in zip(of_healthy, of_faulty, strict=True):
        if print_program(one.after) != print_program(other.after):
            return Place(traced, one.record.name, one.record.bucket, frozenset(), False)
    texts = [(folder / "plan.json").read_text() for folder in (healthy, faulty)]
    return Place(traced, None, None, frozenset(_odd_weights(healthy, faulty)), texts[0] != texts[1])


def _odd_weights(healthy: Path, faulty: Path) -> set[str]:
    found: set[str] = set()
    opened = open_artifact(healthy), open_artifact(faulty)
    for rank in ranks(mesh_of(opened[0].manifest)):
        left, right = (map_weights(one, rank) for one in opened)
        # By bytes: a changed byte may make a NaN.
        found |= {name for name in left if not torch.equal(_bytes(left[name]), _bytes(right[name]))}
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
