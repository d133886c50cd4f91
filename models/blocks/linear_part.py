"""A linear map in place of a layer's attention or feed-forward part, as in Nemotron-NAS."""

from dataclasses import dataclass

import torch

from ingot.models.blocks.block import Block
from ingot.models.blocks.linear import Linear
from ingot.models.blocks.positions import Positions
from ingot.models.params import Place


@dataclass(frozen=True)
class LinearPartSpec:
    """A linear without a bias, which a layer has instead of attention or of a feed-forward part.

    `stored` is its name in the checkpoint, within the layer.
    """

    stored: str

    def build(self, place: Place, hidden: int, layer: int) -> "LinearPart":
        return LinearPart(place / self.stored, hidden)


class LinearPart(Block):
    """A linear instead of attention or of a feed-forward part: x [T, hidden] -> [T, hidden].

    On a mesh, each rank has the whole weight.
    """

    def __init__(self, place: Place, hidden: int) -> None:
        super().__init__()
        self.map = Linear(place, hidden, hidden)

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        return self.map(x)
