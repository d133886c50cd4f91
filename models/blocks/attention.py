"""Attention with a KV cache: grouped heads, rotary embedding or ALiBi, windows, and norms of q and k."""

from dataclasses import dataclass, field, replace

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.alibi import AlibiSpec
from ingot.models.blocks.linear import Linear, LinearsFirst
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions, PositionScaleSpec, RotarySpec
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class AttentionNames:
    """The names of an attention's tensors in the checkpoint.

    place        the attention's prefix within the layer
    q, k, v, o   names of the four linears
    merged       name of one tensor that holds q, k and v; None: there is no such tensor
    merged_kv    name of one tensor that holds k and v; None: there is no such tensor
    order        order of q, k and v in `merged`
    groups       number of equal groups of rows in the merged tensor. Each group holds rows of q, k and v in that order.
                 With one group per k/v head, the rows are [kv_heads, heads / kv_heads + 2, head_dim].
    sinks        name of the sinks
    """

    place: str = "self_attn"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    merged: str | None = None
    merged_kv: str | None = None
    order: str = "qkv"
    groups: int = 1
    sinks: str = "sinks"

    def qkv(self, place: Place, q_size: int, k_size: int, v_size: int) -> list[Place]:
        """Return the locations of q, k and v in the checkpoint, in this order.

        `place` is the location of the attention. The sizes are the numbers of rows of q, k and v.
        """
        if self.merged is not None:
            sizes = {"q": q_size, "k": k_size, "v": v_size}
            parts = (place / self.merged).split(*(sizes[one] for one in self.order), groups=self.groups)
            return [parts[self.order.index(one)] for one in "qkv"]
        if self.merged_kv is not None:
            return [place / self.q, *(place / self.merged_kv).split(k_size, v_size, groups=self.groups)]
        return [place / self.q, place / self.k, place / self.v]


@dataclass(frozen=True)
class QKNormSpec:
    """Norms of q and k in an attention.

    over             "head": a norm of each head, with the same weights for all heads. "each head": a norm of each head,
                     with different weights. "all heads": one norm over all heads of a token.
    after_rotation   whether norms of heads come after the rotary embedding
    """

    q: NormSpec
    k: NormSpec
    over: str = "head"
    after_rotation: bool = False

    def __post_init__(self) -> None:
        assert not self.after_rotation or self.over != "all heads", "norms over all heads come before rotation"

    @staticmethod
    def of(norm: NormSpec, over: str = "head") -> "QKNormSpec":
        """Return norms of q and k that both equal `norm`. The checkpoint calls them "q_norm" and "k_norm".

        `over` is "head", "each head" or "all heads", as in QKNormSpec.
        """
        return QKNormSpec(norm.named("q_norm"), norm.named("k_norm"), over)


@dataclass(frozen=True)
class QLatentSpec:
    """A latent of q, from which the heads of q are made: q = up(norm(down(x))). It is not cached.

    rank   elements of the latent
    norm   norm of the latent
    up     name of the linear from the latent to the heads. AttentionNames.q is the name of the linear to the latent.
    """

    rank: int
    norm: NormSpec
    up: str


@dataclass(frozen=True)
class AttentionSpec:
    """An attention of a layer: the sizes, the linears, and what happens to q, k, v and the scores.

    heads      number of q heads
    kv_heads   number of k heads, and of v heads
    head_dim   elements of a head of q, and of k
    q_latent   latent of q; None: the heads of q are made of the hidden states
    bias       whether the linears of q, k and v have biases
    o_bias     whether the output linear has a bias
    rotary     rotary embedding of q and k; None: no rotary embedding
    alibi      ALiBi, which lowers scores with the distance; None: no ALiBi
    qk_norm    norms of q and k; None: no norms
    clip       limit on the absolute values of q, k and v after their linears; None: no limit
    window     sliding window: number of positions that a token sees, including its own; None: no window
    chunk      a token sees only positions of its own chunk of this number of positions; None: no chunks
    q_scale    factor on q by position, after norm and rotation; None: no such factor
    scale      factor on scores; None: head_dim ** -0.5
    soft_cap   cap on scores, as in cap * tanh(score / cap); None: no cap
    v_width    elements of a head of v; None: head_dim
    v_norm     norm of each head of v; None: no norm
    v_scale    factor on v; None: no factor
    sinks      whether the softmax of each head has one more logit, a weight, that attends to nothing
    names      names of the tensors in the checkpoint
    """

    heads: int
    kv_heads: int
    head_dim: int
    q_latent: QLatentSpec | None = None
    bias: bool = False
    o_bias: bool = False
    rotary: RotarySpec | None = field(default_factory=RotarySpec)
    alibi: AlibiSpec | None = None
    qk_norm: QKNormSpec | None = None
    clip: float | None = None
    window: int | None = None
    chunk: int | None = None
    q_scale: PositionScaleSpec | None = None
    scale: float | None = None
    soft_cap: float | None = None
    v_width: int | None = None
    v_norm: NormSpec | None = None
    v_scale: float | None = None
    sinks: bool = False
    names: AttentionNames = AttentionNames()

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, "a mask has a window or chunks"
        assert self.q_latent is None or not self.bias, "the two linears of a latent have no biases"

    @property
    def value_width(self) -> int:
        """The number of elements of a head of v."""
        return self.head_dim if self.v_width is None else self.v_width

    def build(self, place: Place, hidden: int, layer: int) -> "Attention":
        return Attention(self, place / self.names.place, hidden, layer)

    def options(self) -> dict[str, float | str]:
        """Return the keyword arguments of the op `attention`: `scale`, and `mask` and `soft_cap` if set.

        The caller adds the argument `layer`.
        """
        options: dict[str, float | str] = {"scale": self.head_dim**-0.5 if self.scale is None else self.scale}
        if self.window is not None:
            options["mask"] = f"window_{self.window}"
        if self.chunk is not None:
            options["mask"] = f"chunked_{self.chunk}"
        if self.soft_cap is not None:
            options["soft_cap"] = self.soft_cap
        return options


class Attention(LinearsFirst):
    """Attention within each sequence of the step: x [T, hidden] -> [T, hidden].

    `layer` is the layer's index, which is also the number of its KV cache. On a mesh, every rank computes the whole
    latent of q.
    """

    def __init__(self, spec: AttentionSpec, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.spec, self.layer, over = spec, layer, spec.qk_norm.over if spec.qk_norm else None
        q_size, k_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        v_size, mixed = spec.kv_heads * spec.value_width, spec.heads * spec.value_width
        heads = Split("tp", 0, unit=spec.head_dim)
        # Ranks may share a head of k and v, unless one norm covers all heads.
        k_heads = replace(heads, repeat=over != "all heads")
        v_heads = replace(k_heads, unit=spec.value_width)
        latent = spec.q_latent
        q, k, v = spec.names.qkv(place, q_size if latent is None else latent.rank, k_size, v_size)
        self.q_down = self.q_latent_norm = None
        if latent is None:
            self.q = Linear(q, hidden, q_size, bias=spec.bias, split=heads)
        else:
            self.q_down = Linear(q, hidden, latent.rank)
            self.q_latent_norm = Norm(latent.norm, place, latent.rank)
            self.q = Linear(place / latent.up, latent.rank, q_size, split=heads)
        self.k = Linear(k, hidden, k_size, bias=spec.bias, split=k_heads)
        self.v = Linear(v, hidden, v_size, bias=spec.bias, split=v_heads)
        by_value = Split("tp", 1, unit=spec.value_width)
        self.o = Linear(place / spec.names.o, mixed, hidden, bias=spec.o_bias, split=by_value)
        self.first = (self.q if self.q_down is None else self.q_down, self.k, self.v)
        self.sinks = None
        if spec.sinks:
            self.sinks = parameter((spec.heads,), place.source(spec.names.sinks), place.dtype, Split("tp", 0))
        self.slopes = None if spec.alibi is None else spec.alibi.slopes(spec.heads)
        if spec.qk_norm is not None:
            self.q_norm = self._norm(spec.qk_norm.q, place, spec.heads, Split("tp", 0))
            self.k_norm = self._norm(spec.qk_norm.k, place, spec.kv_heads, Split("tp", 0, repeat=True))
        self.v_norm = None if spec.v_norm is None else Norm(spec.v_norm, place, spec.value_width)

    def _norm(self, norm: NormSpec, place: Place, heads: int, by_head: Split) -> Norm:
        assert self.spec.qk_norm is not None
        match self.spec.qk_norm.over:
            case "all heads":
                return Norm(norm, place, heads * self.spec.head_dim)
            case "each head":
                return Norm(norm, place, heads, self.spec.head_dim, split=by_head)
        return Norm(norm, place, self.spec.head_dim)

    def matches(self) -> dict[str, int]:
        return {"insert-paged-kv": 1, **super().matches()}

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        spec, over = self.spec, self.spec.qk_norm.over if self.spec.qk_norm else None
        of_q = x if self.q_down is None or self.q_latent_norm is None else self.q_latent_norm(self.q_down(x))
        q, k, v = self.q(of_q), self.k(x), self.v(x)
        if spec.clip is not None:
            q, k, v = (ops.clamp(part, limit=spec.clip) for part in (q, k, v))
        if spec.v_scale is not None:
            v = v * spec.v_scale
        if over == "all heads":
            q, k = self.q_norm(q), self.k_norm(k)
        # view(-1, …), never x.shape[0]: the number of tokens is symbolic during tracing.
        q = q.view(-1, spec.heads, spec.head_dim)
        k, v = k.view(-1, spec.kv_heads, spec.head_dim), v.view(-1, spec.kv_heads, spec.value_width)
        late = spec.qk_norm is not None and spec.qk_norm.after_rotation
        if over in ("head", "each head") and not late:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if spec.rotary is not None:
            q, k = spec.rotary.rotate(q, at), spec.rotary.rotate(k, at)
        if late:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.q_scale is not None:
            q = spec.q_scale.scale(q, at)
        at.cached[self.layer] = k, v
        more = [] if self.sinks is None and self.slopes is None else [self.sinks]
        more += [] if self.slopes is None else [self.slopes]
        attended = ops.attention(q, k, v, at.positions, at.token_seqs, *more, layer=self.layer, **self.options())
        return self.o(attended.view(-1, spec.heads * spec.value_width))

    def options(self) -> dict[str, float | str]:
        return self.spec.options()
