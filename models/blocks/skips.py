"""Skips: the stream as it was before one layer is mixed into what a later layer reads."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SkipSpec:
    """Layer `to` reads weight * (the stream before layer `start`) + (1 - weight) * (the stream before it). Layers count
    from 0, and what is kept is the stream before any skip to the same layer."""

    start: int
    to: int
    weight: float

    def mix(self, kept: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """kept, h [T, hidden] -> [T, hidden]."""
        return kept * self.weight + h * (1 - self.weight)
