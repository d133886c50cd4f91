"""The language-model head, which computes logits from hidden states."""

from dataclasses import dataclass

import torch
from torch import nn

from ingot.ir import ops, recipe
from ingot.models.blocks.block import Block
from ingot.models.blocks.embedding import OF_VOCAB
from ingot.models.blocks.linear import Linear
from ingot.models.blocks.projection import ProjectionSpec
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class HeadSpec:
    """The language-model head: the linear from hidden states to logits.

    tied         whether its weight is the embedding's table
    bias         whether a bias is added to the logits
    normed       whether each row of its weight is divided by the row's L2 norm; without effect if `tied`
    scale        a factor on the logits; None: no factor
    soft_cap     cap on the scaled logits, as in cap * tanh(logit / cap); None: no cap
    stored       name of the head in the checkpoint
    projection   a linear before the head, from the hidden size to the width of its weight; None: both are equal
    """

    tied: bool = False
    bias: bool = False
    normed: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    stored: str = "lm_head"
    projection: ProjectionSpec | None = None


class Head(Block):
    """The language-model head: hidden states h [L, hidden] -> logits f32[L, vocab].

    `tied` is the embedding's table. A tied head uses it as weight.
    """

    def __init__(self, spec: HeadSpec, place: Place, vocab: int, hidden: int, tied: nn.Parameter) -> None:
        super().__init__()
        projection, root = spec.projection, place
        place, dtype = root / spec.stored, root.dtype
        width = hidden if projection is None else projection.width
        self.spec = spec
        self.projection = None if projection is None else Linear(root / projection.stored, hidden, width)
        table = recipe.normalize(place.source("weight")) if spec.normed else place.source("weight")
        self.weight = tied if spec.tied else parameter((vocab, width), table, dtype, OF_VOCAB)
        self.bias = parameter((vocab,), place.source("bias"), dtype, OF_VOCAB) if spec.bias else None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h if self.projection is None else self.projection(h)
        bias = () if self.bias is None else (self.bias,)
        logits = ops.cast(ops.linear(h, self.weight, *bias), dtype=torch.float32)
        if self.spec.scale is not None:
            logits = logits * self.spec.scale
        return logits if self.spec.soft_cap is None else ops.soft_cap(logits, cap=self.spec.soft_cap)
