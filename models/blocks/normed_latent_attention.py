"""Latent attention whose latents are made of keys with a norm, and of values: TransMLA (arXiv 2502.07864) with norms.

A norm of each head of the keys depends on the token, so the matrix to the latents cannot be merged into the linears.
"""

from dataclasses import dataclass, field

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.latent_attention import LatentNames, rotate_in_parts, up_matrices
from ingot.models.blocks.linear import Linear, LinearsFirst
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions, RotarySpec
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class NormedLatentAttentionSpec:
    """An attention of a layer that computes q, k and v with a norm of each head, and caches a latent of k and v.

    heads            number of heads
    kv_heads         number of heads of k and v. Latents are made of all of them.
    head_dim         elements of a head of q, k and v
    rank             elements of the latent of keys and values
    rotated          elements of a head's query that are rotated, and of the rotated key that all heads share
    q_norm, k_norm   norms of each head of q and k
    scale            factor on scores
    bias             whether the linears of q, k and v have biases
    o_bias           whether the output linear has a bias
    rotary           rotary embedding of the rotated parts
    rope_heads       number of equal parts of the rotated elements. Each part is rotated by the whole rotary table.
    names            names of the tensors in the checkpoint
    """

    heads: int
    kv_heads: int
    head_dim: int
    rank: int
    rotated: int
    q_norm: NormSpec
    k_norm: NormSpec
    scale: float
    bias: bool = False
    o_bias: bool = False
    rotary: RotarySpec = field(default_factory=RotarySpec)
    rope_heads: int = 1
    names: LatentNames = field(default_factory=LatentNames)

    def __post_init__(self) -> None:
        assert self.rotated % self.rope_heads == 0, "the parts of the rotated elements are equal"

    def build(self, place: Place, hidden: int, layer: int) -> "NormedLatentAttention":
        return NormedLatentAttention(self, place / self.names.place, hidden, layer)


class NormedLatentAttention(LinearsFirst):
    """Latent attention within each sequence of the step, with norms of q and k: x [T, hidden] -> [T, hidden].

    `layer` is the layer's index, which is also the number of its cache. A mesh splits the heads of q. Every rank
    computes all keys, values and latents, and its cache holds all latents.
    """

    def __init__(self, spec: NormedLatentAttentionSpec, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.spec, self.layer, names = spec, layer, spec.names
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        by_head = Split("tp", 0, unit=spec.head_dim)
        self.q = Linear(place / names.q, hidden, queries, bias=spec.bias, split=by_head)
        self.k, self.v = (Linear(place / name, hidden, keys, bias=spec.bias) for name in (names.k, names.v))
        self.first = (self.q, self.k, self.v)
        self.q_norm, self.k_norm = (Norm(norm, place, spec.head_dim) for norm in (spec.q_norm, spec.k_norm))
        self.kv_down = Linear(place / names.kv_down, 2 * keys, spec.rank + spec.rotated)
        by_rotated = Split("tp", 0, unit=spec.rotated)
        rows, matrix = spec.heads * spec.rotated, (place / names.q_rotated).matrix("weight")
        self.q_rotated = parameter((rows, spec.head_dim), matrix, place.dtype, by_rotated)
        self.k_up, self.v_up = up_matrices(place / names.kv_up, spec.heads, spec.head_dim, spec.head_dim, spec.rank)
        by_column = Split("tp", 1, unit=spec.head_dim)
        self.o = Linear(place / names.o, queries, hidden, bias=spec.o_bias, split=by_column)

    def matches(self) -> dict[str, int]:
        return {"absorb-latents": 1, "insert-paged-kv": 1, **super().matches()}

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        spec, width = self.spec, self.spec.head_dim
        q, k, v = self.q(x), self.k(x), self.v(x)
        # view(-1, …), never x.shape[0]: the number of tokens is symbolic during tracing.
        q = self.q_norm(q.view(-1, spec.heads, width))
        k = self.k_norm(k.view(-1, spec.kv_heads, width)).view(-1, spec.kv_heads * width)
        down = self.kv_down(ops.concat(k, v, dim=1)).view(-1, 1, spec.rank + spec.rotated)
        q_rotated = ops.head_linear(q, self.q_rotated.view(spec.heads, spec.rotated, width))
        q_rotated, k_rotated = (
            rotate_in_parts(spec.rotary, one, spec.rope_heads, at)
            for one in (q_rotated, down[:, :, spec.rank : spec.rank + spec.rotated])
        )
        k_up, v_up = (one.view(spec.heads, width, spec.rank) for one in (self.k_up, self.v_up))
        args = (q, q_rotated, down[:, :, : spec.rank], k_rotated, k_up, v_up, at.positions, at.token_seqs)
        mixed = ops.latent_attention(*args, scale=spec.scale, layer=self.layer)
        return self.o(mixed.view(-1, spec.heads * width))
