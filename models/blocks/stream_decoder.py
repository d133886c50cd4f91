"""A decoder-only model with several residual streams (AltUp) and per-layer embeddings, as Gemma 3n."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ingot.ir import ops
from ingot.models.blocks.altup import AltUpSpec, JoinedStreams, Streams
from ingot.models.blocks.block import Block
from ingot.models.blocks.decoder import DecoderNames
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.head import Head, HeadSpec
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.per_layer_embedding import PerLayerEmbeddingSpec
from ingot.models.blocks.positions import Positions, rope_table
from ingot.models.blocks.stream_layer import StreamLayerSpec
from ingot.models.config import RopeSpec
from ingot.models.params import Place


@dataclass(frozen=True)
class StreamDecoderSpec:
    """A decoder-only model with several residual streams per token, each of `hidden` elements (Gemma 3n).

    altup    number of streams, and how layers update them
    inputs   the per-layer embeddings
    norm     the norm before the head
    ropes    the rotary tables; layers refer to them by index
    names    names of the tensors in the checkpoint
    """

    vocab: int
    hidden: int
    layers: tuple[StreamLayerSpec, ...]
    altup: AltUpSpec
    inputs: PerLayerEmbeddingSpec
    norm: NormSpec
    ropes: tuple[RopeSpec, ...]
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)
    head: HeadSpec = field(default_factory=HeadSpec)
    names: DecoderNames = field(default_factory=DecoderNames)

    def ignored(self) -> tuple[str, ...]:
        """Return regular expressions of the tensor names that a checkpoint may hold and Ingot does not read."""
        return self.names.ignored(self.head)


class StreamDecoder(Block):
    """A decoder-only model with several residual streams, from token ids to logits. Build it on the meta device.

    dtype         dtype of the weights. Rotary tables are float32.
    max_seq_len   number of rows in the rotary tables
    """

    def __init__(self, spec: StreamDecoderSpec, dtype: torch.dtype, max_seq_len: int) -> None:
        super().__init__()
        root, place, hidden, names = Place("", dtype), Place(spec.names.place, dtype), spec.hidden, spec.names
        self.embed = spec.embedding.build(place, spec.vocab, hidden)
        self.inputs = spec.inputs.build(place, spec.vocab, hidden)
        self.streams = Streams(spec.altup, place, hidden)
        self.layers = nn.ModuleList(
            layer.build(place / names.layers / index, hidden, index) for index, layer in enumerate(spec.layers)
        )
        self.joined = JoinedStreams(spec.altup, place, hidden)
        self.norm = Norm(spec.norm, place, hidden)
        self.head = Head(spec.head, root, spec.vocab, hidden, self.embed.weight)
        self.ropes = nn.ParameterList(rope_table(rope, max_seq_len) for rope in spec.ropes)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Return logits f32[L, vocab] for some of the step's tokens.

        tokens       ids of the tokens, i32[T]
        positions    positions of the tokens in their sequences, i32[T]
        token_seqs   index of each token's sequence, i32[T]
        logit_rows   indices of the tokens that get logits, i32[L]
        """
        at = Positions(positions, token_seqs, tuple(self.ropes))
        h = self.embed(tokens, at)
        embeddings, streams = self.inputs(tokens, h), self.streams(h)
        for layer in self.layers:
            streams = layer(streams, embeddings, at)
        return self.head(self.norm(self.joined(ops.select_rows(streams, logit_rows))))

    def matches(self) -> dict[str, int]:
        """Return {"merge-linears": 1}: the pass must merge the two linears that read the token embedding."""
        return {"merge-linears": 1}
