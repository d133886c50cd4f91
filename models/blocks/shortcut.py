"""Experts next to two layers: they read the input of the first layer's feed-forward part, and the second adds them.

In LongCat-Flash (arXiv 2509.01322), the second layer's attention and feed-forward part do not wait for the experts.
"""

from dataclasses import dataclass

import torch

from ingot.models.blocks.block import Block
from ingot.models.blocks.experts import ExpertsSpec
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.positions import Positions
from ingot.models.params import Place


@dataclass(frozen=True)
class ShortcutStartSpec:
    """The feed-forward part of the first layer, and the experts, which read the same input."""

    mlp: GatedSpec
    experts: ExpertsSpec

    def build(self, place: Place, hidden: int, layer: int) -> "ShortcutStart":
        return ShortcutStart(self, place, hidden, layer)


class ShortcutStart(Block):
    """The first layer's feed-forward part: x [T, hidden] -> [T, hidden]. It keeps the experts' result in `at`."""

    def __init__(self, spec: ShortcutStartSpec, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.mlp = spec.mlp.build(place, hidden, layer)
        self.experts = spec.experts.build(place, hidden, layer)

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        at.shortcuts[self.layer] = self.experts(x, at)
        return self.mlp(x, at)


@dataclass(frozen=True)
class ShortcutEndSpec:
    """The feed-forward part of the second layer.

    start   index of the first layer
    """

    mlp: GatedSpec
    start: int

    def build(self, place: Place, hidden: int, layer: int) -> "ShortcutEnd":
        return ShortcutEnd(self, place, hidden, layer)


class ShortcutEnd(Block):
    """The second layer's feed-forward part, and the experts' result: x [T, hidden] -> [T, hidden]."""

    def __init__(self, spec: ShortcutEndSpec, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.start = spec.start
        self.mlp = spec.mlp.build(place, hidden, layer)

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        return self.mlp(x, at) + at.shortcuts[self.start]
