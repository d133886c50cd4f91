"""LAuReL: a learned low-rank residual connection in parallel to a block (arXiv 2411.07501)."""

from dataclasses import dataclass

import torch

from ingot.ir.types import Split
from ingot.models.blocks.linear import Linear, LinearsFirst
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.params import Place


@dataclass(frozen=True)
class LaurelSpec:
    """A LAuReL connection: x + norm(right(left(x))).

    The linear `left` has `rank` outputs, and `right` has `rank` inputs.
    """

    rank: int
    norm: NormSpec

    def build(self, place: Place, hidden: int) -> "Laurel":
        return Laurel(self, place / "laurel", hidden)


class Laurel(LinearsFirst):
    """A LAuReL connection, a learned low-rank residual: x [T, hidden] -> [T, hidden]."""

    def __init__(self, spec: LaurelSpec, place: Place, hidden: int) -> None:
        super().__init__()
        # Split like the linears of attention, because `left` is merged with them.
        self.left = Linear(place / "linear_left", hidden, spec.rank, split=Split("tp", 0))
        self.right = Linear(place / "linear_right", spec.rank, hidden, split=Split("tp", 1))
        self.norm = Norm(spec.norm, place, hidden)
        self.first = (self.left,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.right(self.left(x)))
