"""A decoder: embedding, layers, final norm, head, and the rotary tables of its layers."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ingot.ir import ops
from ingot.models.blocks.block import Block
from ingot.models.blocks.embedding import AnyEmbeddingSpec, EmbeddingSpec
from ingot.models.blocks.head import Head, HeadSpec
from ingot.models.blocks.layer import Layer, LayerSpec
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions, rope_table
from ingot.models.blocks.skips import SkipSpec
from ingot.models.config import RopeSpec
from ingot.models.params import Place


@dataclass(frozen=True)
class DecoderNames:
    """The checkpoint's names for a decoder and its layers.

    place            prefix of the decoder's tensors
    layers           name of the layers, below `place`
    transposed       matrices are stored [inputs, outputs]
    may_lack_place   some checkpoints omit the first part of `place` in all names
    unread           patterns of tensors that some checkpoints contain and nothing reads
    """

    place: str = "model"
    layers: str = "layers"
    transposed: bool = False
    may_lack_place: bool = False
    unread: tuple[str, ...] = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    def ignored(self, head: HeadSpec) -> tuple[str, ...]:
        """Return `unread`, and the copy of a tied head."""
        return (*self.unread, *((rf"{head.stored}\.weight",) if head.tied else ()))


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder, with the rotary tables that its layers share. `norm` is the final norm; some decoders have none.
    `skips` are in order of application."""

    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    ropes: tuple[RopeSpec, ...] = ()
    embedding: AnyEmbeddingSpec = field(default_factory=EmbeddingSpec)
    head: HeadSpec = field(default_factory=HeadSpec)
    skips: tuple[SkipSpec, ...] = ()
    names: DecoderNames = DecoderNames()

    def ignored(self) -> tuple[str, ...]:
        """Return the patterns of tensors that some checkpoints contain and nothing reads, such as a tied head."""
        return self.names.ignored(self.head)

    def optional_prefix(self) -> str:
        """Return the prefix that a checkpoint has in all tensor names or in none; "" if there is no such prefix."""
        return f"{self.names.place.partition('.')[0]}." if self.names.may_lack_place else ""


class Decoder(Block):
    """Token ids to logits. Build it on the meta device; weights are of `dtype`, rotary tables of float32."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, max_seq_len: int) -> None:
        super().__init__()
        root, hidden, names = Place("", dtype), spec.hidden, spec.names
        place = Place(names.place, dtype, transposed=names.transposed)
        self.spec = spec
        self.embed = spec.embedding.build(place, spec.vocab, hidden)
        self.layers = nn.ModuleList(
            layer.build(place / names.layers / index, hidden, index) for index, layer in enumerate(spec.layers)
        )
        self.norm = None if spec.norm is None else Norm(spec.norm, place, hidden)
        self.head = Head(spec.head, root, spec.vocab, hidden, self.embed.weight)
        self.ropes = nn.ParameterList(rope_table(rope, max_seq_len) for rope in spec.ropes)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """tokens, positions, token_seqs i32[T], logit_rows i32[L] -> logits f32[L, vocab]."""
        at = self.at(positions, token_seqs)
        h = self.embed(tokens, at)
        before: list[torch.Tensor] = []  # the stream before each layer
        for index, layer in enumerate(self.layers):
            before.append(h)
            for skip in self.spec.skips:
                if skip.to == index:
                    h = skip.mix(before[skip.start], h)
            h = layer(h, at)
        x = ops.select_rows(h, logit_rows)
        return self.head(x if self.norm is None else self.norm(x))

    def at(self, positions: torch.Tensor, token_seqs: torch.Tensor) -> Positions:
        """Return the positions argument of layers."""
        return Positions(positions, token_seqs, tuple(self.ropes))

    def matches(self) -> dict[str, int]:
        """Count the layers, except the first, that begin with a norm of the sum of the layer before. A layer may be
        empty."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer) and layer.branches]
        return {"fuse-add-rms-norm": sum(layer.begins_with_rms_norm for layer in layers[1:])}
