"""A decoder-only model: embedding, layers, final norm, head, and the rotary tables of its layers."""

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
    """The names of a decoder's tensors in the checkpoint.

    place            prefix of the decoder's tensors, such as "model"
    layers           name of the list of layers, after that prefix
    together         number of successive layers that the list has as one
    transposed       whether matrices are stored as [inputs, outputs]
    may_lack_place   whether some checkpoints omit the first part of `place`, up to its first dot, in all names
    unread           regular expressions of tensor names. Some checkpoints hold such tensors, and Ingot does not read
                     them.
    """

    place: str = "model"
    layers: str = "layers"
    together: int = 1
    transposed: bool = False
    may_lack_place: bool = False
    unread: tuple[str, ...] = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    def ignored(self, head: HeadSpec) -> tuple[str, ...]:
        """Return regular expressions of the tensor names that a checkpoint may hold and Ingot does not read.

        They are `unread` and, if the head is tied, the head's weight. That is a copy of the embedding.
        """
        return (*self.unread, *((rf"{head.stored}\.weight",) if head.tied else ()))


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only model with `vocab` tokens and hidden states of `hidden` elements.

    norm    the norm before the head; None: no norm
    ropes   the rotary tables; layers refer to them by index
    skips   skip connections between layers, in the order in which they are applied
    names   names of the tensors in the checkpoint
    """

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
        """Return regular expressions of the tensor names that a checkpoint may hold and Ingot does not read."""
        return self.names.ignored(self.head)

    def optional_prefix(self) -> str:
        """Return the prefix that some checkpoints omit in all tensor names, such as "model."; "" if there is none."""
        return f"{self.names.place.partition('.')[0]}." if self.names.may_lack_place else ""


class Decoder(Block):
    """A decoder-only model, from token ids to logits. Build it on the meta device.

    dtype         dtype of the weights. Rotary tables are float32.
    max_seq_len   number of rows in the rotary tables
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, max_seq_len: int) -> None:
        super().__init__()
        root, hidden, names = Place("", dtype), spec.hidden, spec.names
        place = Place(names.place, dtype, transposed=names.transposed)
        self.spec = spec
        self.embed = spec.embedding.build(place, spec.vocab, hidden)
        self.layers = nn.ModuleList(
            layer.build(place / names.layers / (index // names.together), hidden, index)
            for index, layer in enumerate(spec.layers)
        )
        self.norm = None if spec.norm is None else Norm(spec.norm, place, hidden)
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
        """Return the argument `at` of layers: positions and sequences of the tokens, with the rotary tables."""
        return Positions(positions, token_seqs, tuple(self.ropes))

    def matches(self) -> dict[str, int]:
        """Return how many adds the pass fuse-add-rms-norm must fuse with the first norm of the next layer.

        It is the number of layers that begin with an RMS norm, without the first layer. Layers without parts, such as
        attention, do not count.
        """
        layers = [layer for layer in self.layers if isinstance(layer, Layer) and layer.branches]
        return {"fuse-add-rms-norm": sum(layer.begins_with_rms_norm for layer in layers[1:])}
