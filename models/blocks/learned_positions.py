"""Learned position embeddings, added to the token embeddings."""

from dataclasses import dataclass

import torch

from ingot.ir import ops, recipe
from ingot.models.blocks.embedding import Embedding, EmbeddingSpec
from ingot.models.blocks.positions import Positions
from ingot.models.blocks.projection import ProjectionSpec
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class LearnedPositionsSpec:
    """The sum of token embeddings and learned position embeddings, as in GPT-2.

    positions          length of the longest sequence
    stored             name of the token table in the checkpoint
    stored_positions   name of the position table in the checkpoint
    offset             index of position 0 in the stored position table
    projection         a linear on the token embeddings before the sum, from the table's width to the hidden size; None:
                       both are equal
    """

    positions: int
    stored: str
    stored_positions: str
    offset: int = 0
    projection: ProjectionSpec | None = None

    @property
    def most_positions(self) -> int:
        return self.positions

    def build(self, place: Place, vocab: int, hidden: int) -> "LearnedPositions":
        return LearnedPositions(self, place, vocab, hidden)


class LearnedPositions(Embedding):
    """Token embeddings plus position embeddings: token ids i32[T] and Positions -> hidden states [T, hidden]."""

    def __init__(self, spec: LearnedPositionsSpec, place: Place, vocab: int, hidden: int) -> None:
        super().__init__(EmbeddingSpec(stored=spec.stored, projection=spec.projection), place, vocab, hidden)
        table = (place / spec.stored_positions).source("weight")
        if spec.offset:
            table = recipe.take_slice(table, 0, spec.offset, spec.offset + spec.positions)
        self.positions = parameter((spec.positions, hidden), table, place.dtype)

    def forward(self, tokens: torch.Tensor, at: Positions) -> torch.Tensor:
        return super().forward(tokens, at) + ops.embedding(at.positions, self.positions)
