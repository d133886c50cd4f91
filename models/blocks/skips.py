"""Skip connections between layers, as in Solar Pro: a layer's input includes the input of an earlier layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SkipSpec:
    """A skip connection between two layers, which count from 0.

    Layer `to` reads `weight` * (input of layer `start`) + (1 - `weight`) * (its own input). If layer `start` has a skip
    connection too, its input before that connection counts.
    """

    start: int
    to: int
    weight: float

    def mix(self, kept: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, hidden] of the inputs of two layers: `kept` of `start`, and `h` of `to`."""
        return kept * self.weight + h * (1 - self.weight)
