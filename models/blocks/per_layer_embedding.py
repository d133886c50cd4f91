"""Per-layer token embeddings, as in Gemma 3n: a second token table with a part for each layer."""

from dataclasses import dataclass

import torch

from ingot.ir import ops, recipe
from ingot.ir.recipe import Recipe
from ingot.models.blocks.block import Block
from ingot.models.blocks.embedding import OF_VOCAB
from ingot.models.blocks.linear import Linear
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.params import Place, parameter, rounded


@dataclass(frozen=True)
class PerLayerEmbeddingSpec:
    """A second token embedding, with a separate vector for each layer (Gemma 3n).

    A token's vectors for all layers are a row of a second token table, plus a normed projection of its ordinary
    embedding.

    rows     rows of the table. Tokens with higher ids use row 0.
    layers   number of layers
    width    elements of the vector for one layer
    norm     norm of the projection
    """

    rows: int
    layers: int
    width: int
    norm: NormSpec

    def build(self, place: Place, vocab: int, hidden: int) -> "PerLayerEmbedding":
        return PerLayerEmbedding(self, place, vocab, hidden)


class PerLayerEmbedding(Block):
    """Computes per-layer embeddings: token ids i32[T] and ordinary embeddings h [T, hidden] -> [T, layers, width]."""

    def __init__(self, spec: PerLayerEmbeddingSpec, place: Place, vocab: int, hidden: int) -> None:
        super().__init__()
        self.layers, self.width, size = spec.layers, spec.width, spec.layers * spec.width
        table = (place / "embed_tokens_per_layer").source("weight")
        self.table = parameter((max(vocab, spec.rows), size), _padded(table, spec.rows, vocab), place.dtype, OF_VOCAB)
        self.projection = Linear(place / "per_layer_model_projection", hidden, size)
        self.norm = Norm(spec.norm, place, spec.width)
        # The last factor keeps the magnitude of a sum of two.
        scales = (spec.width**0.5, hidden**-0.5, 2**-0.5)
        self.of_table, self.of_projection, self.of_sum = (rounded(scale, place.dtype) for scale in scales)

    def forward(self, tokens: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        stored = (ops.embedding(tokens, self.table) * self.of_table).view(-1, self.layers, self.width)
        projected = (self.projection(h) * self.of_projection).view(-1, self.layers, self.width)
        return (self.norm(projected) + stored) * self.of_sum


def _padded(table: Recipe, rows: int, vocab: int) -> Recipe:
    """Return the recipe that extends a token table of `rows` rows to `vocab` rows, with copies of row 0."""
    if rows >= vocab:
        return table
    return recipe.concat([table, recipe.repeat(recipe.take_slice(table, 0, 0, 1), 0, vocab - rows)])


@dataclass(frozen=True)
class PerLayerInputSpec:
    """How a layer mixes hidden states x with the token's per-layer embedding e.

    It computes norm(projection(activation(gate(x)) * e)).

    width        elements of e
    activation   "gelu" or "gelu_tanh"
    scaled       whether x is first multiplied by a learned vector
    """

    width: int
    norm: NormSpec
    activation: str = "gelu_tanh"
    scaled: bool = True

    def build(self, place: Place, hidden: int, layer: int) -> "PerLayerInput":
        return PerLayerInput(self, place, hidden, layer)


class PerLayerInput(Block):
    """Mixes hidden states with per-layer embeddings: x [T, hidden] and [T, layers, width] -> [T, hidden].

    It reads only the embedding of its own layer, number `layer`.
    """

    def __init__(self, spec: PerLayerInputSpec, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        scale = (place / "altup").source("correct_output_scale")
        self.scale = parameter((hidden,), scale, place.dtype) if spec.scaled else None
        self.gate = Linear(place / "per_layer_input_gate", hidden, spec.width)
        self.projection = Linear(place / "per_layer_projection", spec.width, hidden)
        self.norm = Norm(spec.norm, place, hidden)

    def forward(self, x: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        own = embeddings[:, self.layer : self.layer + 1].view(-1, self.spec.width)
        x = x if self.scale is None else x * self.scale
        approximate = "tanh" if self.spec.activation == "gelu_tanh" else "none"
        return self.norm(self.projection(ops.gelu_mul(self.gate(x), own, approximate=approximate)))
