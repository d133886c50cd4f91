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
    """The checkpoint's names for a decoder and its layers.

    place            prefix of the decoder's tensors
    layers           name of the layers, after that prefix
    transposed       matrices are stored [inputs, outputs]
    may_lack_place   some checkpoints omit the first part of `place` in all names
    unread           regular expressions of the names of tensors that some checkpoints contain and nothing reads
    """

    place: str = "model"
    layers: str = "layers"
    transposed: bool = False
    may_lack_place: bool = False
    unread: tuple[str, ...] = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    def ignored(self, head: HeadSpec) -> tuple[str, ...]:
        """Return patterns of the tensor names that a checkpoint may contain and nothing reads.

        They are `unread`, and the copy of the embedding that a tied head may have in the checkpoint.
        """
        return (*self.unread, *((rf"{head.stored}\.weight",) if head.tied else ()))


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only model, of `vocab` tokens and a residual stream of `hidden` elements.

    norm    the final norm; None: none
    ropes   the rotary tables, which layers refer to by number
    skips   skip connections from the input of a layer to that of a later one, in order of application
    names   the checkpoint's names
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
        """Return patterns of tensor names that some checkpoints contain and nothing reads, such as a tied head's."""
        return self.names.ignored(self.head)

    def optional_prefix(self) -> str:
        """Return the prefix that a checkpoint has in all tensor names or in none; "" if there is no such prefix."""
        return f"{self.names.place.partition('.')[0]}." if self.names.may_lack_place else ""


class Decoder(Block):
    """A decoder-only model, from token ids to logits. Build it on the meta device.

    Weights have the dtype `dtype`. Rotary tables are float32 and have `max_seq_len` rows.
    """

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
        """Return logits f32[L, vocab] of the tokens with the indices `logit_rows` i32[L].

        `tokens` i32[T] are the ids of a step's tokens, `positions` i32[T] their positions in their sequences, and
        `token_seqs` i32[T] the indices of these sequences.
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
        """Return the argument `at` of layers: the tokens' positions and sequences, with the rotary tables."""
        return Positions(positions, token_seqs, tuple(self.ropes))

    def matches(self) -> dict[str, int]:
        """Return how many fusions of an add and an RMS norm there must be between layers.

        There is one for each layer, except the first, that begins with such a norm. Layers without branches are
        skipped.
        """
        layers = [layer for layer in self.layers if isinstance(layer, Layer) and layer.branches]
        return {"fuse-add-rms-norm": sum(layer.begins_with_rms_norm for layer in layers[1:])}
