"""ALiBi: attention scores decrease with the distance of keys, instead of position embeddings (arXiv 2108.12409)."""

from dataclasses import dataclass

import torch
from torch import nn

from ingot.ir import recipe
from ingot.ir.types import Split
from ingot.models.params import parameter


@dataclass(frozen=True)
class AlibiSpec:
    """ALiBi in an attention: a slope for each q head. The slopes are a geometric sequence times `factor`.

    If the number of heads is a power of two, the last slope is `factor` * 2 ** -`flattest`. The paper and most models
    use 8 for `flattest`.
    """

    flattest: float = 8.0
    factor: float = 1.0

    def slopes(self, heads: int) -> nn.Parameter:
        """Return the slopes of `heads` q heads as a parameter f32[heads].

        On a mesh, each rank holds the slopes of its heads.
        """
        made = recipe.table(kind="alibi", heads=heads, flattest=self.flattest, factor=self.factor)
        return parameter((heads,), made, torch.float32, Split("tp", 0))
