"""Multi-head latent attention (arXiv 2405.04434): the keys and values of all heads are made of one latent per token."""

from dataclasses import dataclass, field, replace

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.linear import Linear, LinearsFirst
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions, PositionScaleSpec, RotarySpec
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class LatentNames:
    """The names of a latent attention's tensors in the checkpoint.

    place      the attention's prefix within the layer
    q          the linear of q, if q has no latent
    q_down     the linear from hidden states to the latent of q
    q_up       the linear from the latent of q to q. Its rows are [heads, inner + rotated].
    kv_down    the linear from hidden states to the latent of keys and values, and to the rotated key after it
    kv_up      the matrix from that latent to keys and values. Its rows are [heads, inner + value_width].
    o          the output linear
    """

    place: str = "self_attn"
    q: str = "q_proj"
    q_down: str = "q_a_proj"
    q_up: str = "q_b_proj"
    kv_down: str = "kv_a_proj_with_mqa"
    kv_up: str = "kv_b_proj"
    o: str = "o_proj"


@dataclass(frozen=True)
class LatentAttentionSpec:
    """A multi-head latent attention of a layer: the sizes, the linears and the norms of latents.

    heads         number of heads
    inner         elements of a head's query and key that are not rotated
    rotated       elements of a head's query that are rotated, and of the rotated key that all heads share
    value_width   elements of a head's value
    rank          elements of the latent of keys and values
    kv_norm       norm of that latent
    kv_factor     factor on the latent after its norm; None: no factor
    q_rank        elements of the latent of q; None: q has no latent
    q_norm        norm of the latent of q; None without one
    scale         factor on scores
    bias          whether the linears to the latents have biases
    o_bias        whether the output linear has a bias
    rotary        rotary embedding of the rotated parts
    q_scale       factor on q by position; None: no such factor
    names         names of the tensors in the checkpoint
    """

    heads: int
    inner: int
    rotated: int
    value_width: int
    rank: int
    kv_norm: NormSpec
    scale: float
    kv_factor: float | None = None
    q_rank: int | None = None
    q_norm: NormSpec | None = None
    bias: bool = False
    o_bias: bool = False
    rotary: RotarySpec = field(default_factory=RotarySpec)
    q_scale: PositionScaleSpec | None = None
    names: LatentNames = LatentNames()

    def __post_init__(self) -> None:
        assert (self.q_rank is None) == (self.q_norm is None), "the latent of q has a norm"

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
        self.kv_norm = Norm(spec.kv_norm, place, spec.rank)
        self.q_down = self.q_norm = None
        if spec.q_rank is None or spec.q_norm is None:
            self.q = Linear(place / names.q, hidden, q_size, split=by_head)
            self.first = (self.q, self.kv_down)
        else:
            self.q_down = Linear(place / names.q_down, hidden, spec.q_rank, bias=spec.bias)
            self.q_norm = Norm(spec.q_norm, place, spec.q_rank)
            self.q = Linear(place / names.q_up, spec.q_rank, q_size, split=by_head)
            self.first = (self.q_down, self.kv_down)
        sizes = {"k": spec.inner, "v": spec.value_width}
        rows = (place / names.kv_up).split(*(spec.heads * size for size in sizes.values()), groups=spec.heads)
        self.k_up, self.v_up = (
            parameter((spec.heads * size, spec.rank), part.matrix("weight"), place.dtype, replace(by_head, unit=size))
            for part, size in zip(rows, sizes.values(), strict=True)
        )
        mixed = spec.heads * spec.value_width
        by_value = Split("tp", 1, unit=spec.value_width)
        self.o = Linear(place / names.o, mixed, hidden, bias=spec.o_bias, split=by_value)

    def matches(self) -> dict[str, int]:
        return {"absorb-latents": 1, "insert-paged-kv": 1, **super().matches()}

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        spec, rotate, width = self.spec, self.spec.rotary.rotate, self.spec.inner + self.spec.rotated
        # view(-1, …), never x.shape[0]: the number of tokens is symbolic during tracing.
        down = self.kv_down(x).view(-1, 1, spec.rank + spec.rotated)
        latents = self.kv_norm(down[:, :, : spec.rank])
        latents = latents if spec.kv_factor is None else latents * spec.kv_factor
        k_rotated = rotate(down[:, :, spec.rank : spec.rank + spec.rotated], at)
        q = self.q(x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x)))
        q = q.view(-1, spec.heads, width)
        # Before the rotation, which keeps the factor: both parts of q get it in one call.
        q = q if spec.q_scale is None else spec.q_scale.scale(q, at)
        q, q_rotated = q[:, :, : spec.inner], rotate(q[:, :, spec.inner : width], at)
        k_up = self.k_up.view(spec.heads, spec.inner, spec.rank)
        v_up = self.v_up.view(spec.heads, spec.value_width, spec.rank)
        args = (q, q_rotated, latents, k_rotated, k_up, v_up, at.positions, at.token_seqs)
        mixed = ops.latent_attention(*args, scale=spec.scale, layer=self.layer)
        return self.o(mixed.view(-1, spec.heads * spec.value_width))
