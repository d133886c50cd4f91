"""A decoder: embedding, layers, the last norm and the head."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.block import Block
from ingot.models.blocks.layer import LayerSpec
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions, rope_table
from ingot.models.config import RopeSpec
from ingot.models.params import Place, parameter

_OF_VOCAB = Split("tp", 0, needed=False)  # a vocabulary that does not divide is not split


class AnyEmbeddingSpec(Protocol):
    """The spec of what makes the stream of tokens; `most_positions` is how long a sequence may be by it, None: of any
    length."""

    @property
    def most_positions(self) -> int | None: ...

    def build(self, place: Place, vocab: int, hidden: int) -> "Embedding":
        """The module, with the table `weight` [vocab, hidden] that a tied head reads; it is called with tokens i32[T]
        and Positions, and gives [T, hidden]."""


@dataclass(frozen=True)
class EmbeddingSpec:
    """Rows of a table by the tokens. `scale` is a factor on them, rounded to the model's dtype first if `rounded`."""

    scale: float | None = None
    rounded: bool = False
    stored: str = "embed_tokens"

    @property
    def most_positions(self) -> int | None:
        return None

    def build(self, place: Place, vocab: int, hidden: int) -> "Embedding":
        return Embedding(self, place / self.stored, vocab, hidden)


@dataclass(frozen=True)
class HeadSpec:
    """Logits from hidden states: by the embedding's table if `tied`, times `scale`, then cap * tanh(logit / cap)."""

    tied: bool = False
    bias: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    stored: str = "lm_head"


@dataclass(frozen=True)
class DecoderNames:
    """Where the checkpoint has a decoder and its layers. Matrices may be stored `transposed`, [inputs, outputs]. With
    `may_lack_place` some checkpoints have names without `place` in front. `unread` are patterns of tensors that some
    carry and nothing reads."""

    place: str = "model"
    layers: str = "layers"
    transposed: bool = False
    may_lack_place: bool = False
    unread: tuple[str, ...] = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder, with the rotary tables that its layers share."""

    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    ropes: tuple[RopeSpec, ...] = ()
    embedding: AnyEmbeddingSpec = EmbeddingSpec()
    head: HeadSpec = HeadSpec()
    names: DecoderNames = DecoderNames()

    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that some checkpoints carry and nothing reads, a copy of a tied head among them."""
        copy = (rf"{self.head.stored}\.weight",) if self.head.tied else ()
        return (*self.names.unread, *copy)

    def optional_prefix(self) -> str:
        """What the names of all tensors begin with, or none of them; "" where that is not so."""
        return f"{self.names.place}." if self.names.may_lack_place else ""


class Embedding(Block):
    """tokens i32[T] -> [T, hidden]."""

    def __init__(self, spec: EmbeddingSpec, place: Place, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = parameter((vocab, hidden), place.source("weight"), place.dtype, _OF_VOCAB)
        self.scale = spec.scale
        if spec.scale is not None and spec.rounded:
            self.scale = torch.tensor(spec.scale, dtype=place.dtype, device="cpu").item()

    def forward(self, tokens: torch.Tensor, at: Positions) -> torch.Tensor:
        h = ops.embedding(tokens, self.weight)
        return h if self.scale is None else h * self.scale


class Head(Block):
    """h [L, hidden] -> logits f32[L, vocab]. `tied` is the embedding's weight where it is the head's too."""

    def __init__(self, spec: HeadSpec, place: Place, vocab: int, hidden: int, tied: nn.Parameter) -> None:
        super().__init__()
        place, dtype = place / spec.stored, place.dtype
        self.spec = spec
        self.weight = tied if spec.tied else parameter((vocab, hidden), place.source("weight"), dtype, _OF_VOCAB)
        self.bias = parameter((vocab,), place.source("bias"), dtype, _OF_VOCAB) if spec.bias else None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        bias = () if self.bias is None else (self.bias,)
        logits = ops.cast(ops.linear(h, self.weight, *bias), dtype=torch.float32)
        if self.spec.scale is not None:
            logits = logits * self.spec.scale
        return logits if self.spec.soft_cap is None else ops.soft_cap(logits, cap=self.spec.soft_cap)


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
        self.norm = Norm(spec.norm, place, hidden)
        self.head = Head(spec.head, root, spec.vocab, hidden, self.embed.weight)
        self.ropes = nn.ParameterList(rope_table(rope, max_seq_len) for rope in spec.ropes)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """tokens, positions, token_seqs i32[T], logit_rows i32[L] -> logits f32[L, vocab]."""
        at = self.at(positions, token_seqs)
        h = self.embed(tokens, at)
        for layer in self.layers:
            h = layer(h, at)
        x = self.norm(ops.select_rows(h, logit_rows))
        return self.head(x)

    def at(self, positions: torch.Tensor, token_seqs: torch.Tensor) -> Positions:
        """What layers are called with."""
        return Positions(positions, token_seqs, tuple(self.ropes))

    def matches(self) -> dict[str, int]:
        """A norm in front of a layer follows the sum at the end of the layer before it."""
        return {"fuse-add-rms-norm": sum(layer.begins_with_rms_norm for layer in self.layers[1:])}
