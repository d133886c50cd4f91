"""The head: logits of hidden states."""

from dataclasses import dataclass

import torch
from torch import nn

from ingot.ir import ops
from ingot.models.blocks.block import Block
from ingot.models.blocks.embedding import OF_VOCAB
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class HeadSpec:
    """Logits from hidden states: by the embedding's table if `tied`, times `scale`, then cap * tanh(logit / cap)."""

    tied: bool = False
    bias: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    stored: str = "lm_head"


class Head(Block):
    """h [L, hidden] -> logits f32[L, vocab]. `tied` is the embedding's weight where it is the head's too."""

    def __init__(self, spec: HeadSpec, place: Place, vocab: int, hidden: int, tied: nn.Parameter) -> None:
        super().__init__()
        place, dtype = place / spec.stored, place.dtype
        self.spec = spec
        self.weight = tied if spec.tied else parameter((vocab, hidden), place.source("weight"), dtype, OF_VOCAB)
        self.bias = parameter((vocab,), place.source("bias"), dtype, OF_VOCAB) if spec.bias else None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        bias = () if self.bias is None else (self.bias,)
        logits = ops.cast(ops.linear(h, self.weight, *bias), dtype=torch.float32)
        if self.spec.scale is not None:
            logits = logits * self.spec.scale
        return logits if self.spec.soft_cap is None else ops.soft_cap(logits, cap=self.spec.soft_cap)
