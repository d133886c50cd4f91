"""ALiBi: attention scores decrease with the distance of keys, instead of position embeddings (arXiv 2108.12409)."""

from dataclasses import dataclass

import torch
from torch import nn

from ingot.ir import recipe
from ingot.ir.types import Split
from ingot.models.params import parameter


@dataclass(frozen=True)
class AlibiSpec:
    """ALiBi for an attention. The slopes of its heads are a geometric sequence times `factor`.

    The sequence ends with 2 ** -`flattest` if the number of heads is a power of two. The paper's sequence, as in Bloom
    and most models, ends with 2 ** -8.
    """

    flattest: float = 8.0
    factor: float = 1.0

    def slopes(self, heads: int) -> nn.Parameter:
        """Return the slopes of `heads` q heads as a parameter f32[heads]. A mesh splits them like the heads."""
        made = recipe.table(kind="alibi", heads=heads, flattest=self.flattest, factor=self.factor)
        return parameter((heads,), made, torch.float32, Split("tp", 0))
