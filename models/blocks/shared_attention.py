"""Attention that reads the KV cache of an earlier layer and has none itself, as in Gemma 3n."""

from dataclasses import dataclass

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.linear import Linear, LinearsFirst
from ingot.models.blocks.norm import Norm
from ingot.models.blocks.positions import Positions
from ingot.models.params import Place


@dataclass(frozen=True)
class SharedAttentionSpec:
    """An attention that reads keys and values of an earlier layer. It computes only queries.

    attention   describes the queries and the output linear. Heads and window must equal those of the earlier layer.
    source      index of the earlier layer
    """

    attention: AttentionSpec
    source: int

    def __post_init__(self) -> None:
        of, norms = self.attention, self.attention.qk_norm
        assert of.alibi is None and of.clip is None, "queries are rotated, and are not clipped"
        assert of.value_width == of.head_dim, "values are as wide as keys"
        assert of.q_latent is None, "queries are made of the hidden states"
        assert of.q_scale is None, "queries are not scaled by position"
        assert norms is None or not norms.after_rotation, "norms come before rotation"

    def build(self, place: Place, hidden: int, layer: int) -> "SharedAttention":
        return SharedAttention(self, place / self.attention.names.place, hidden)


class SharedAttention(LinearsFirst):
    """Attention over the keys and values of an earlier layer: x [T, hidden] -> [T, hidden]."""

    def __init__(self, spec: SharedAttentionSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.spec, of = spec, spec.attention
        q_size, heads = of.heads * of.head_dim, Split("tp", 0, unit=of.head_dim)
        self.q = Linear(place / of.names.q, hidden, q_size, bias=of.bias, split=heads)
        self.o = Linear(place / of.names.o, q_size, hidden, bias=of.o_bias, split=Split("tp", 1, unit=of.head_dim))
        self.first = (self.q,)
        self.q_norm = None
        if of.qk_norm is not None:
            shapes = {"head": (of.head_dim,), "each head": (of.heads, of.head_dim), "all heads": (q_size,)}
            split = Split("tp", 0) if of.qk_norm.over == "each head" else None
            self.q_norm = Norm(of.qk_norm.q, place, *shapes[of.qk_norm.over], split=split)

    def matches(self) -> dict[str, int]:
        return {"insert-paged-kv": 1, **super().matches()}

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        of, source = self.spec.attention, self.spec.source
        q, whole = self.q(x), of.qk_norm is not None and of.qk_norm.over == "all heads"
        if self.q_norm is not None and whole:
            q = self.q_norm(q)
        q = q.view(-1, of.heads, of.head_dim)
        if self.q_norm is not None and not whole:
            q = self.q_norm(q)
        if of.rotary is not None:
            q = of.rotary.rotate(q, at)
        attended = ops.attention(q, *at.cached[source], at.positions, at.token_seqs, layer=source, **of.options())
        return self.o(attended.view(-1, of.heads * of.head_dim))
