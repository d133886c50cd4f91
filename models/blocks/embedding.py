"""The token embedding of a model, optionally scaled, projected and normed."""

from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.block import Block
from ingot.models.blocks.linear import Linear
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions
from ingot.models.blocks.projection import ProjectionSpec
from ingot.models.params import Place, parameter, rounded

OF_VOCAB = Split("tp", 0, needed=False)  # a vocabulary that does not divide is not split


class AnyEmbeddingSpec(Protocol):
    """The interface of embedding specs, which build the module from token ids to the first hidden states.

    `most_positions` is the length of the longest sequence that it supports; None: no limit.
    """

    @property
    def most_positions(self) -> int | None: ...

    def build(self, place: Place, vocab: int, hidden: int) -> "Embedding":
        """Return the embedding module: token ids i32[T] and Positions -> hidden states [T, hidden].

        `place` is the prefix of its tensors in the checkpoint. Its parameter `weight` is the token table, which a tied
        head reads too.
        """


@dataclass(frozen=True)
class EmbeddingSpec:
    """The token embedding of a model.

    scale        a factor on the embeddings; None: no factor
    rounded      whether `scale` is first rounded to the model's dtype
    norm         a norm of the result; None: no norm
    stored       name of the token table in the checkpoint
    projection   a linear from the table's width to the hidden size; None: both are equal
    """

    scale: float | None = None
    rounded: bool = False
    norm: NormSpec | None = None
    stored: str = "embed_tokens"
    projection: ProjectionSpec | None = None

    @property
    def most_positions(self) -> int | None:
        return None

    def build(self, place: Place, vocab: int, hidden: int) -> "Embedding":
        return Embedding(self, place, vocab, hidden)


class Embedding(Block):
    """The token embedding: tokens i32[T] -> hidden states [T, hidden]."""

    def __init__(self, spec: EmbeddingSpec, place: Place, vocab: int, hidden: int) -> None:
        super().__init__()
        projection, table = spec.projection, place / spec.stored
        width = hidden if projection is None else projection.width
        self.weight = parameter((vocab, width), table.source("weight"), place.dtype, OF_VOCAB)
        self.projection = None if projection is None else Linear(place / projection.stored, width, hidden)
        self.norm = None if spec.norm is None else Norm(spec.norm, place, hidden)
        self.scale = spec.scale
        if spec.scale is not None and spec.rounded:
            self.scale = rounded(spec.scale, place.dtype)

    def forward(self, tokens: torch.Tensor, at: Positions) -> torch.Tensor:
        h = ops.embedding(tokens, self.weight)
        h = h if self.projection is None else self.projection(h)
        h = h if self.scale is None else h * self.scale
        return h if self.norm is None else self.norm(h)
