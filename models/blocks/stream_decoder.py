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
    """A decoder-only model with several residual streams, of `vocab` tokens and `hidden` elements per stream.

    altup    the streams
    inputs   the per-layer embeddings
    norm     the final norm
    ropes    the rotary tables, which layers refer to by number
    names    the checkpoint's names
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
        """Return patterns of tensor names that some checkpoints contain and nothing reads, such as a tied head's."""
        return self.names.ignored(self.head)


class StreamDecoder(Block):
    """A decoder-only model with several residual streams, from token ids to logits. Build it on the meta device.

    Weights have the dtype `dtype`. Rotary tables are float32 and have `max_seq_len` rows.
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
        """Return logits f32[L, vocab] of the tokens with the indices `logit_rows` i32[L].

        `tokens` i32[T] are the ids of a step's tokens, `positions` i32[T] their positions in their sequences, and
        `token_seqs` i32[T] the indices of these sequences.
        """
        at = Positions(positions, token_seqs, tuple(self.ropes))
        h = self.embed(tokens, at)
        embeddings, streams = self.inputs(tokens, h), self.streams(h)
        for layer in self.layers:
            streams = layer(streams, embeddings, at)
        return self.head(self.norm(self.joined(ops.select_rows(streams, logit_rows))))

    def matches(self) -> dict[str, int]:
        """Return the rewrites that passes must apply: one merge of the two projections of the token embedding."""
        return {"merge-linears": 1}
