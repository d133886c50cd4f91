"""Multi-head latent attention (arXiv 2405.04434): the keys and values of all heads are made of one latent per token."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.indexer import IndexerSpec
from ingot.models.blocks.linear import Linear, LinearsFirst
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions, PositionScaleSpec, RotarySpec
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class LatentNames:
    """The names of the tensors of attention with latents in the checkpoint.

    place      the attention's prefix within the layer
    q          the linear of q, if q has no latent
    q_down     the linear from hidden states to the latent of q
    q_up       the linear from the latent of q to q. Its rows are [heads, inner + rotated].
    kv_down    the linear to the latent of keys and values, and to the rotated key after it
    kv_up      the matrix from that latent to keys and values. Its rows are [heads, inner + value_width].
    o          the output linear

    These belong to latents that are made of keys and values (`NormedLatentAttentionSpec`):

    k, v       the linears of keys and values
    q_rotated  the matrix [heads * rotated, head_dim] that makes the rotated part of each head's query of the query
    """

    place: str = "self_attn"
    q: str = "q_proj"
    q_down: str = "q_a_proj"
    q_up: str = "q_b_proj"
    kv_down: str = "kv_a_proj_with_mqa"
    kv_up: str = "kv_b_proj"
    o: str = "o_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    q_rotated: str = "q_rope_proj"


@dataclass(frozen=True)
class LatentAttentionSpec:
    """A multi-head latent attention of a layer: the sizes, the linears and the norms of latents.

    heads         number of heads
    inner         elements of a head's query and key that are not rotated
    rotated       elements of a head's query that are rotated, and of the rotated key that all heads share
    value_width   elements of a head's value
    rank          elements of the latent of keys and values
    kv_norm       norm of that latent; None: no norm
    kv_factor     factor on the latent after its norm; None: no factor
    q_rank        elements of the latent of q; None: q has no latent
    q_norm        norm of the latent of q; None without one
    scale         factor on scores
    bias          whether the linears to the latents have biases
    q_bias        whether the linear of q has a bias, if q has no latent
    o_bias        whether the output linear has a bias
    rotary        rotary embedding of the rotated parts
    rope_heads    number of equal parts of the rotated elements. Each part is rotated by the whole rotary table.
    q_scale       factor on q by position; None: no such factor
    indexer       chooses the positions that a token reads, from the latent of q; None: it reads all
    names         names of the tensors in the checkpoint
    """

    heads: int
    inner: int
    rotated: int
    value_width: int
    rank: int
    kv_norm: NormSpec | None
    scale: float
    kv_factor: float | None = None
    q_rank: int | None = None
    q_norm: NormSpec | None = None
    bias: bool = False
    q_bias: bool = False
    o_bias: bool = False
    rotary: RotarySpec = field(default_factory=RotarySpec)
    rope_heads: int = 1
    q_scale: PositionScaleSpec | None = None
    indexer: IndexerSpec | None = None
    names: LatentNames = LatentNames()

    def __post_init__(self) -> None:
        assert (self.q_rank is None) == (self.q_norm is None), "the latent of q has a norm"
        assert self.q_rank is None or not self.q_bias, "q has a latent"
        assert self.rotated % self.rope_heads == 0, "the parts of the rotated elements are equal"
        assert self.indexer is None or self.q_rank is not None, "an indexer reads the latent of q"

    def build(self, place: Place, hidden: int, layer: int) -> "LatentAttention":
        return LatentAttention(self, place / self.names.place, hidden, layer)


class LatentAttention(LinearsFirst):
    """Multi-head latent attention within each sequence of the step: x [T, hidden] -> [T, hidden].

    `layer` is the layer's index, which is also the number of its cache. A mesh splits the heads. Every rank computes
    all latents, and its cache holds all of them.
    """

    def __init__(self, spec: LatentAttentionSpec, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.spec, self.layer, names = spec, layer, spec.names
        q_size = spec.heads * (spec.inner + spec.rotated)
        by_head = Split("tp", 0, unit=spec.inner + spec.rotated)
        self.kv_down = Linear(place / names.kv_down, hidden, spec.rank + spec.rotated, bias=spec.bias)
        self.kv_norm = None if spec.kv_norm is None else Norm(spec.kv_norm, place, spec.rank)
        self.q_down = self.q_norm = None
        if spec.q_rank is None or spec.q_norm is None:
            self.q = Linear(place / names.q, hidden, q_size, bias=spec.q_bias, split=by_head)
            self.first = (self.q, self.kv_down)
        else:
            self.q_down = Linear(place / names.q_down, hidden, spec.q_rank, bias=spec.bias)
            self.q_norm = Norm(spec.q_norm, place, spec.q_rank)
            self.q = Linear(place / names.q_up, spec.q_rank, q_size, split=by_head)
            self.first = (self.q_down, self.kv_down)
        self.indexer = None
        if spec.indexer is not None and spec.q_rank is not None:
            self.indexer = spec.indexer.build(place, hidden, spec.q_rank, layer)
            self.first = (*self.first, self.indexer.k)
        self.k_up, self.v_up = up_matrices(place / names.kv_up, spec.heads, spec.inner, spec.value_width, spec.rank)
        mixed = spec.heads * spec.value_width
        by_value = Split("tp", 1, unit=spec.value_width)
        self.o = Linear(place / names.o, mixed, hidden, bias=spec.o_bias, split=by_value)

    def matches(self) -> dict[str, int]:
        return {"absorb-latents": 1, "insert-paged-kv": 1, **super().matches()}

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        spec, width = self.spec, self.spec.inner + self.spec.rotated
        # view(-1, …), never x.shape[0]: the number of tokens is symbolic during tracing.
        down = self.kv_down(x).view(-1, 1, spec.rank + spec.rotated)
        latents = down[:, :, : spec.rank]
        latents = latents if self.kv_norm is None else self.kv_norm(latents)
        latents = latents if spec.kv_factor is None else latents * spec.kv_factor
        k_rotated = self._rotated(down[:, :, spec.rank : spec.rank + spec.rotated], at)
        q_latent = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q(q_latent).view(-1, spec.heads, width)
        # Before the rotation, which keeps the factor: both parts of q get it in one call.
        q = q if spec.q_scale is None else spec.q_scale.scale(q, at)
        q, q_rotated = q[:, :, : spec.inner], self._rotated(q[:, :, spec.inner : width], at)
        k_up = self.k_up.view(spec.heads, spec.inner, spec.rank)
        v_up = self.v_up.view(spec.heads, spec.value_width, spec.rank)
        args = (q, q_rotated, latents, k_rotated, k_up, v_up, at.positions, at.token_seqs)
        chosen = () if self.indexer is None else (self.indexer(x, q_latent, at),)
        mixed = ops.latent_attention(*args, *chosen, scale=spec.scale, layer=self.layer)
        return self.o(mixed.view(-1, spec.heads * spec.value_width))

    def _rotated(self, parts: torch.Tensor, at: Positions) -> torch.Tensor:
        return rotate_in_parts(self.spec.rotary, parts, self.spec.rope_heads, at)


def rotate_in_parts(rotary: RotarySpec, x: torch.Tensor, rope_heads: int, at: Positions) -> torch.Tensor:
    """Return x [T, heads, rotated] after the rotary embedding of each of `rope_heads` equal parts of its last axis."""
    if rope_heads == 1:
        return rotary.rotate(x, at)
    width = x.shape[2] // rope_heads
    parts = [rotary.rotate(x[:, :, begin : begin + width], at) for begin in range(0, rope_heads * width, width)]
    joined = parts[0]
    for part in parts[1:]:
        joined = ops.concat(joined, part, dim=2)
    return joined


def up_matrices(place: Place, heads: int, inner: int, value_width: int, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the matrices [heads * inner, rank] and [heads * value_width, rank] from latents to keys and values.

    The checkpoint stores both as one matrix in `place`. Its rows are [heads, inner + value_width].
    """
    rows = place.split(heads * inner, heads * value_width, groups=heads)
    k_up, v_up = (
        parameter((heads * size, rank), part.matrix("weight"), part.dtype, Split("tp", 0, unit=size))
        for part, size in zip(rows, (inner, value_width), strict=True)
    )
    return k_up, v_up
