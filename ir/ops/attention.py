"""Attention over the tokens of a step, as traced. A pass replaces it by ops over a paged KV cache."""

from collections.abc import Mapping
from typing import Any

import torch

from ingot.ir.cache.dtype import SCALE_DEFAULTS, CacheScales
from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import VerifyError
from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.ops.registry import Sample, define, own_row, wide
from ingot.ir.ops.tree import MAX_NODES, bits_of
from ingot.ir.placements import Call, Fit, by_heads

UNSCALED = CacheScales()


def attention_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention scores [KV, H / KV, n, m] before the softmax, for q [n, H, D] and k [m, KV, D].

    The dot products are multiplied by `scale`. `soft_cap` then bounds them to cap * tanh(score / cap); None: no bound.
    `bias` [H, n, m] is added last. Scores are -inf where `mask` [n, m] is False. `sinks` [H] adds one more column of
    scores. This column takes part in the softmax, but no value belongs to it.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = wide(q).view(q.shape[0], kv_heads, heads // kv_heads, q.shape[2])
    scores = torch.einsum("nkgd,mkd->kgnm", grouped, k.to(grouped.dtype)) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if bias is not None:
        scores = scores + bias.view(scores.shape)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores
    return torch.cat([scores, wide(sinks).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)


def distance_bias(
    q: torch.Tensor, slopes: torch.Tensor | None, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | None:
    """Return the ALiBi bias [H, n, m] of the scores: slope * (key position - query position).

    `slopes` [H] has one slope per head. None without slopes. `queries` [n] and `keys` [m] are positions. The bias is
    float64 if q [n, H, D] is, else float32.
    """
    if slopes is None:
        return None
    return slopes.to(wide(q[:0]).dtype)[:, None, None] * (keys[None, :] - queries[:, None])


def check_slopes(q: torch.Tensor, slopes: torch.Tensor | None) -> None:
    """Raise VerifyError unless ALiBi's `slopes` is a float32 or float64 tensor with one slope per head of q.

    q is [T, H, D], so `slopes` must be [H]. None is allowed.
    """
    if slopes is not None and (slopes.shape != q.shape[1:2] or slopes.dtype not in (torch.float32, torch.float64)):
        raise VerifyError(f"slopes {slopes.dtype} {list(slopes.shape)}", expected=f"float32 [{q.shape[1]}], by heads")


def check_chosen(q: torch.Tensor, chosen: torch.Tensor | None) -> None:
    """Raise VerifyError unless `chosen` is i32[T, K] for q [T, H, D]: positions for each token. None is allowed."""
    if chosen is not None and (chosen.dtype != torch.int32 or chosen.dim() != 2 or chosen.shape[0] != q.shape[0]):
        raise VerifyError(f"chosen positions {chosen.dtype} {list(chosen.shape)}", expected="int32 [T, K]")


def among_chosen(chosen: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor | bool:
    """Return bool[n, m]: whether the key position `keys[j]` is one of `chosen` [n, K] for token i.

    True without `chosen`. Row by row, because a comparison of all at once takes n * m * K bytes.
    """
    return True if chosen is None else torch.stack([(keys[:, None] == row).any(-1) for row in chosen])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    scales: CacheScales = UNSCALED,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the softmax attention [n, H, V] of q [n, H, D] over k [m, KV, D] and v [m, KV, V].

    Query i sees key j where `mask` [n, m] is True. `scales` are the scales of an eight-bit cache, if k and v come from
    one. `soft_cap` bounds the scores; None: no bound. `sinks` [H] are extra logits in the softmax of each head. `bias`
    [H, n, m] is added to the scores.
    """
    weights = attention_scores(q, k, mask, scale * scales.k, soft_cap, sinks, bias).softmax(-1)[..., : k.shape[0]]
    return weighted_values(q, weights, v, scales.v)


def weighted_values(q: torch.Tensor, weights: torch.Tensor, v: torch.Tensor, v_scale: float) -> torch.Tensor:
    """Return the sums of values [n, H, V], weighted by the softmax `weights` [KV, H / KV, n, m].

    `v` is [m, KV, V]. The sums are multiplied by `v_scale` and rounded to the dtype of q [n, H, D].
    """
    mixed = torch.einsum("kgnm,mkd->nkgd", weights, v.to(weights.dtype)).reshape(*q.shape[:2], -1)
    if v_scale != 1.0:
        mixed = mixed * v_scale
    return mixed.to(q.dtype).contiguous()


def like_q(q: torch.Tensor, *_: object, mask: str = CAUSAL.name, **__: object) -> torch.Tensor:
    """Return an empty tensor like q: the shape function of attention ops with values as wide as keys.

    Raises VerifyError for an unknown mask. Also raises it for the mask "tree", which these ops do not support.
    """
    check_mask(mask, None)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def check_mask(mask: str, ancestors: object, slopes: object = None) -> None:
    """Raise VerifyError for an unknown mask, or for arguments that do not fit the mask.

    The mask "tree" needs `ancestors`: for each token, a bit mask of the drafts that it sees in a tree. It does not
    allow ALiBi `slopes`. Other masks do not allow `ancestors`.
    """
    tree = Mask.named(mask).kind == "tree"
    if tree and ancestors is None:
        raise VerifyError(
            "the mask 'tree' without the ancestors of each token",
            expected="paged_attention with ancestors, as the ending 'verify_tree' passes them",
        )
    if tree and slopes is not None:
        raise VerifyError(
            "slopes with the mask 'tree': the tokens of a tree are not stored in the cache in position order",
            where="ingot.paged_attention",
            expected="a tree for attention without slopes",
        )
    if ancestors is not None and not tree:
        raise VerifyError(f"ancestors for the mask '{mask:.80}'", where="ingot.paged_attention", expected="tree")


def result_of(q: torch.Tensor, form: CacheForm) -> torch.Tensor:
    """Return an empty tensor [T, H, V] for the attention result of q [T, H, D].

    `form` says how the cache stores keys and values. It has the width V of a value.
    """
    return q.new_empty(*q.shape[:2], form.value_width)


def seen_in_step(
    mask: Mask, queries: torch.Tensor, keys: torch.Tensor, ancestors: torch.Tensor | None, cached: int
) -> torch.Tensor:
    """Return bool[n, m]: whether query i sees key j of its sequence, by the mask and by a tree of drafts.

    `queries` [n] and `keys` [m] hold positions. Positions below `cached` are from earlier steps. `ancestors` i64[n] is
    given if the step's tokens form a tree. Bit j of `ancestors[i]` says whether query i sees the step's token at
    position `cached` + j. A query with 0 is outside the tree, and then only `mask` counts.
    """
    seen = mask.seen(queries, keys)
    if ancestors is None:
        return seen
    node = keys - cached
    own = bits_of(ancestors)[:, node.clamp(min=0, max=MAX_NODES - 1).long()] & (node < MAX_NODES)
    return seen & (own | (node < 0) | (ancestors == 0)[:, None])


def stated_options(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an attention call that are not at their defaults, by name.

    The options are mask, soft_cap, value_width and the scales of the cache. `call` holds all arguments by parameter
    name.
    """
    defaults = {"mask": CAUSAL.name, "soft_cap": None, "value_width": None, **SCALE_DEFAULTS}
    return {name: call[name] for name, default in defaults.items() if call.get(name, default) != default}


def slopes_sample(heads: int) -> torch.Tensor:
    """Return different ALiBi slopes f32[heads], for sample calls in tests."""
    return torch.linspace(0.9, 0.05, heads)


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    positions = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    seqs = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    args = (randn(5, 6, 16), randn(5, 2, 16), randn(5, 2, 16), positions, seqs)
    plain = {"scale": 0.25, "layer": 0}
    ungrouped = (randn(5, 2, 16), *args[1:])
    chosen = torch.tensor([[0, -1], [0, 1], [0, 2], [0, -1], [1, -1]], dtype=torch.int32)
    return [
        Sample(args, plain),
        Sample((*args, randn(6)), {**plain, "mask": "window_2", "soft_cap": 3.0}),
        Sample((*args, None, slopes_sample(6)), plain),
        Sample((*args, randn(6), slopes_sample(6)), {**plain, "mask": "chunked_2"}),
        Sample(ungrouped, plain),
        *(Sample(args, {**plain, "mask": mask}) for mask in ("chunked_2", "bidirectional", "block_causal_2")),
        Sample((*args[:2], randn(5, 2, 10), *args[3:]), plain),
        Sample((*args[:2], None, *args[3:]), {**plain, "value_width": 12}),
        Sample((*args, None, None, chosen), plain),
    ]


def _attention_rowwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    *,
    scale: float,
    layer: int,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    form = CacheForm.given(q, k, v, value_width)
    v = k[..., : form.value_width] if v is None else v
    out = result_of(q, form)
    for i in range(q.shape[0]):
        seen = (token_seqs == token_seqs[i]) & Mask.named(mask).seen(positions[i : i + 1], positions)[0]
        if chosen is not None:
            seen &= (positions[:, None] == chosen[i]).any(-1)
        one = torch.ones(1, int(seen.sum()), dtype=torch.bool, device=q.device)
        bias = distance_bias(q, slopes, positions[i : i + 1], positions[seen])
        out[i : i + 1] = attend(own_row(q, i), k[seen], v[seen], one, scale, soft_cap, sinks, bias=bias)
    return out


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    *,
    mask: str = CAUSAL.name,
    value_width: int | None = None,
    **_: object,
) -> torch.Tensor:
    """Return an empty result of `attention`: the op's shape function, also for meta tensors.

    Raises VerifyError for an unknown mask, and for widths or slopes that do not fit.
    """
    check_mask(mask, None)
    check_slopes(q, slopes)
    check_chosen(q, chosen)
    return result_of(q, CacheForm.given(q, k, v, value_width))


def _attention_flops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *_: object,
    value_width: int | None = None,
    **__: object,
) -> int:
    # An upper bound: treats all tokens as one unmasked sequence.
    return flops_of(q, CacheForm.given(q, k, v, value_width)) * k.shape[0]


def flops_of(q: torch.Tensor, form: CacheForm) -> int:
    """Return the flops that attention of q [T, H, D] takes for each key.

    They are for the dot products with the key, and for adding the weighted values. `form` has the widths of keys and
    values.
    """
    return 2 * q.shape[0] * q.shape[1] * (form.key_width + form.value_width)


def heads_over(call: Call, keys: str, dim: int, dims: Mapping[str, int], *, with_lse: bool = False) -> Fit:
    """A placement rule for attention whose result [T, H, V] is split by heads: `by_heads`, or q alone.

    `keys` names the argument with the keys, and `dim` is its dim of heads. `dims` has the dims of the other arguments.
    `with_lse` says that the second result is a log-sum-exp [T, H]. A row that is a key and a value, and that all heads
    of q share, is whole on every rank.
    """
    shared = call.values.get("value_width") is not None and call.at[keys] is None and call.size(keys, dim) == 1
    result = (call.shard(1), call.shard(1)) if with_lse else call.shard(1)
    return by_heads(call, dims if shared else {**dims, keys: dim}, result)


def _attention_placement(call: Call) -> Fit:
    fit = heads_over(call, "k", 1, {"q": 1, "v": 1, "sinks": 0, "slopes": 0})
    if "k" not in fit.needs:
        return fit
    if call.at["k"] is None and call.values.get("v") is None and int(call.size("k", 1)) % call.parts:
        raise VerifyError(
            f"a cache whose rows are keys and values has {call.size('k', 1)} heads, "
            f"which do not divide among {call.parts} ranks",
            expected="one head for all heads of q, or heads of the cache that divide",
        )
    if all(call.at[name] == fit.needs[name] for name in ("q", "k")):
        heads, kv_heads = call.size("q", 1), call.size("k", 1)
        assert isinstance(heads, int) and isinstance(kv_heads, int)
        if heads % kv_heads:
            raise VerifyError(f"a rank has {heads} heads of q for {kv_heads} of k and v", expected="a multiple")
    return fit


@define(
    samples=_samples,
    rows=("q",),
    rowwise=_attention_rowwise,
    fake=_attention_fake,
    flops=_attention_flops,
    fusible=False,
    legal="pure",
    placement=_attention_placement,
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    *,
    scale: float,
    layer: int,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Return the attention [T, H, V] within each sequence, for q [T, H, D], k [T, KV, D] and v [T, KV, V].

    H is a multiple of KV. V may differ from D. If `v` is None, values are the first `value_width` numbers of the keys.
    The cache then stores keys only.

    `token_seqs` [T] holds the sequence of each token. `positions` [T] holds its position in that sequence. `mask` says
    which positions a token sees (`ingot.ir.masks`). `soft_cap` bounds each score to cap * tanh(score / cap). `sinks`
    [H] are extra logits in the softmax of each head. `slopes` f32[H] are the slopes of ALiBi (arXiv 2108.12409). After
    the cap, slope * (key position - query position) is added to each score. With `chosen` i32[T, K], a token sees only
    the positions that its row lists, of those that the mask lets it see; -1 is no position.

    A pass later replaces this op by ops that use a KV cache. `layer`, `k_scale` and `v_scale` are for that pass and do
    not change this op's result. Calls with equal `layer` have equal k and v, and will share one cache. The scales are
    for a cache of eight bits.

    Raises VerifyError for an unknown mask, and for widths that do not fit.
    """
    form = CacheForm.given(q, k, v, value_width)
    v = k[..., : form.value_width] if v is None else v
    seen = (token_seqs[:, None] == token_seqs[None, :]) & Mask.named(mask).seen(positions, positions)
    seen = seen & among_chosen(chosen, positions)
    return attend(q, k, v, seen, scale, soft_cap, sinks, bias=distance_bias(q, slopes, positions, positions))
