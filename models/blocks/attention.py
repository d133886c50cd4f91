"""Attention with a KV cache: grouped heads, rotary embedding or ALiBi, windows, and norms of q and k."""

from dataclasses import dataclass, field, replace

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.alibi import AlibiSpec
from ingot.models.blocks.linear import Linear, LinearsFirst
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions, RotarySpec
from ingot.models.params import Place


@dataclass(frozen=True)
class AttentionNames:
    """The checkpoint's names for an attention (`place`, within the layer) and for its linears q, k, v and o.

    merged      the name of one tensor with q, k and v; None: separate tensors
    merged_kv   the name of one tensor with k and v; None: separate tensors
    order       the order of q, k and v in `merged`
    groups      the rows of a merged tensor are in so many groups, each with its part of q, k and v; with a group per
                k/v head the layout is [kv_heads, heads / kv_heads + 2, head_dim]
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

    def qkv(self, place: Place, q_size: int, kv_size: int) -> list[Place]:
        """Return where the checkpoint stores the weights of q, k and v, for an attention with the prefix `place`.

        `q_size` and `kv_size` are the rows of q, and of k and of v.
        """
        if self.merged is not None:
            sizes = {"q": q_size, "k": kv_size, "v": kv_size}
            parts = (place / self.merged).split(*(sizes[one] for one in self.order), groups=self.groups)
            return [parts[self.order.index(one)] for one in "qkv"]
        if self.merged_kv is not None:
            return [place / self.q, *(place / self.merged_kv).split(kv_size, kv_size, groups=self.groups)]
        return [place / self.q, place / self.k, place / self.v]


@dataclass(frozen=True)
class QKNormSpec:
    """Norms of q and k in an attention.

    over             "head": a norm of each head, with weights that all heads share; "each head": a norm of each head,
                     with separate weights; "all heads": one norm over all heads of a token
    after_rotation   norms of heads come after the rotary embedding, not before
    """

    q: NormSpec
    k: NormSpec
    over: str = "head"
    after_rotation: bool = False

    def __post_init__(self) -> None:
        assert not self.after_rotation or self.over != "all heads", "norms over all heads come before rotation"

    @staticmethod
    def of(norm: NormSpec, over: str = "head") -> "QKNormSpec":
        """Return the spec of two norms like `norm`, of q and of k, with the checkpoint names "q_norm" and "k_norm".

        `over` is "head", "each head" or "all heads".
        """
        return QKNormSpec(norm.named("q_norm"), norm.named("k_norm"), over)


@dataclass(frozen=True)
class AttentionSpec:
    """An attention with `heads` q heads and `kv_heads` heads of k and v, of `head_dim` elements.

    bias, o_bias   whether the linears of q, k and v, and of the output, have biases
    rotary         rotary embedding of q and k; None: none
    alibi          decrease of scores with distance; None: none
    qk_norm        norms of q and k; None: none
    clip           limit on the elements of q, k and v after their linears; None: no limit
    window         number of positions that a token sees; None: all
    scale          factor on scores; None: head_dim ** -0.5
    soft_cap       cap on scores: cap * tanh(score / cap); None: no cap
    v_norm         a norm of each head of v; None: none
    names          the checkpoint's names
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    o_bias: bool = False
    rotary: RotarySpec | None = field(default_factory=RotarySpec)
    alibi: AlibiSpec | None = None
    qk_norm: QKNormSpec | None = None
    clip: float | None = None
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    v_norm: NormSpec | None = None
    names: AttentionNames = AttentionNames()

    def build(self, place: Place, hidden: int, layer: int) -> "Attention":
        return Attention(self, place / self.names.place, hidden, layer)

    def options(self) -> dict[str, float | str]:
        """Return the keyword arguments for the op `attention`, except `layer`: scale, mask and soft_cap, if set."""
        options: dict[str, float | str] = {"scale": self.head_dim**-0.5 if self.scale is None else self.scale}
        if self.window is not None:
            options["mask"] = f"window_{self.window}"
        if self.soft_cap is not None:
            options["soft_cap"] = self.soft_cap
        return options


class Attention(LinearsFirst):
    """Attention over the tokens of a sequence: x [T, hidden] -> [T, hidden]. Its KV cache has the number `layer`."""

    def __init__(self, spec: AttentionSpec, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.spec, self.layer, over = spec, layer, spec.qk_norm.over if spec.qk_norm else None
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        heads = Split("tp", 0, unit=spec.head_dim)
        # Ranks may share a head of k and v, unless one norm covers all heads.
        kv_heads = replace(heads, repeat=over != "all heads")
        q, k, v = spec.names.qkv(place, q_size, kv_size)
        self.q = Linear(q, hidden, q_size, bias=spec.bias, split=heads)
        self.k = Linear(k, hidden, kv_size, bias=spec.bias, split=kv_heads)
        self.v = Linear(v, hidden, kv_size, bias=spec.bias, split=kv_heads)
        self.o = Linear(place / spec.names.o, q_size, hidden, bias=spec.o_bias, split=replace(heads, dim=1))
        self.first = (self.q, self.k, self.v)
        self.slopes = None if spec.alibi is None else spec.alibi.slopes(spec.heads)
        if spec.qk_norm is not None:
            self.q_norm = self._norm(spec.qk_norm.q, place, spec.heads, Split("tp", 0))
            self.k_norm = self._norm(spec.qk_norm.k, place, spec.kv_heads, Split("tp", 0, repeat=True))
        self.v_norm = None if spec.v_norm is None else Norm(spec.v_norm, place, spec.head_dim)

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
        q, k, v = self.q(x), self.k(x), self.v(x)
        if spec.clip is not None:
            q, k, v = (ops.clamp(part, limit=spec.clip) for part in (q, k, v))
        if over == "all heads":
            q, k = self.q_norm(q), self.k_norm(k)
        # view(-1, …), never x.shape[0]: the number of tokens is symbolic during tracing.
        q = q.view(-1, spec.heads, spec.head_dim)
        k, v = k.view(-1, spec.kv_heads, spec.head_dim), v.view(-1, spec.kv_heads, spec.head_dim)
        late = spec.qk_norm is not None and spec.qk_norm.after_rotation
        if over in ("head", "each head") and not late:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if spec.rotary is not None:
            q, k = spec.rotary.rotate(q, at), spec.rotary.rotate(k, at)
        if late:
            q, k = self.q_norm(q), self.k_norm(k)
        at.cached[self.layer] = k, v
        slopes = () if self.slopes is None else (None, self.slopes)
        attended = ops.attention(q, k, v, at.positions, at.token_seqs, *slopes, layer=self.layer, **self.options())
        return self.o(attended.view(-1, spec.heads * spec.head_dim))

    def options(self) -> dict[str, float | str]:
        return self.spec.options()
