"""ALiBi: no rotation and no learned positions; scores fall with the distance of keys (arXiv 2108.12409)."""

from dataclasses import dataclass

import torch
from torch import nn

from ingot.ir import recipe
from ingot.ir.types import Split
from ingot.models.params import parameter


@dataclass(frozen=True)
class AlibiSpec:
    """Slopes of heads: a geometric row, which ends with 2 ** -`flattest` where heads are a power of two; times
    `factor`. The paper's row, which Bloom and most others have, ends with 2 ** -8."""

    flattest: float = 8.0
    factor: float = 1.0

    def slopes(self, heads: int) -> nn.Parameter:
        """f32[heads], which a mesh splits as it splits the heads."""
        made = recipe.table(kind="alibi", heads=heads, flattest=self.flattest, factor=self.factor)
        return parameter((heads,), made, torch.float32, Split("tp", 0))
