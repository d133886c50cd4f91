"""Skips: the input of a later layer mixes in the stream from before an earlier layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SkipSpec:
    """Layer `to` reads weight * (the stream before layer `start`) + (1 - weight) * (the stream before layer `to`).
    Layers count from 0. The kept stream of a layer is the one before any skip to that layer."""

    start: int
    to: int
    weight: float

    def mix(self, kept: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Mix kept, h [T, hidden] -> [T, hidden]."""
        return kept * self.weight + h * (1 - self.weight)
