"""Skip connections between layers, as in Solar Pro: a layer's input includes the input of an earlier layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SkipSpec:
    """A skip connection: layer `to` reads `weight` * (input of layer `start`) + (1 - `weight`) * (its own input).

    Layers count from 0. The input of layer `start` is the one before any skip connection to that layer.
    """

    start: int
    to: int
    weight: float

    def mix(self, kept: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, hidden] of `kept`, the input of layer `start`, and `h`, that of layer `to`."""
        return kept * self.weight + h * (1 - self.weight)
