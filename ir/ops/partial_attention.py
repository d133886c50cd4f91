"""Attention over a part of the positions that tokens see, and the op that merges such parts.

Each part comes with the logarithm of the sum of its weights (log-sum-exp). Weighted by these, parts average to the
attention over all of them, however the positions are divided: a shared prefix and the rest of each sequence, the pages
of several devices, cached positions and those of the step.
"""

from typing import Any

import torch

from ingot.ir.cache.dtype import CacheScales
from ingot.ir.cache.form import CacheForm
from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.ops.attention import attention_scores, heads_over, result_of, weighted_values
from ingot.ir.ops.paged_attention import cached_keys, longest_read, paged_attention, paged_samples
from ingot.ir.ops.registry import Effect, Sample, define, own_row, wide
from ingot.ir.placements import Call, Fit, by_heads

Part = tuple[torch.Tensor, torch.Tensor]


def _attend_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    scales: CacheScales,
) -> Part:
    """Return (attention [n, H, V], log-sum-exp [n, H]) of q [n, H, D] over k [m, KV, D] and v [m, KV, V].

    Query i sees key j where `seen` [n, m] is True. A query that sees no key gets attention 0 and log-sum-exp -inf.
    `scales` are the scales of an eight-bit cache, if k and v come from one.
    """
    scores = attention_scores(q, k, seen, scale * scales.k, soft_cap, sinks)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()[..., : k.shape[0]]
    return weighted_values(q, weights, v, scales.v), lse.permute(2, 0, 1).reshape(q.shape[:2]).contiguous()


def _empty(q: torch.Tensor, form: CacheForm) -> Part:
    """Return the results of tokens that see no key: attention [T, H, V] of zeros, and log-sum-exp [T, H] of -inf."""
    return result_of(q, form).zero_(), torch.full(q.shape[:2], float("-inf"), dtype=wide(q[:0]).dtype, device=q.device)


def _part_of_pages(
    q: torch.Tensor,
    kv: torch.Tensor,
    form: CacheForm,
    table: torch.Tensor,
    first: int,
    length: int,
    sinks: torch.Tensor | None,
    scale: float,
    mask: Mask,
    soft_cap: float | None,
    scales: CacheScales,
) -> Part:
    """Return (attention [n, H, V], log-sum-exp [n, H]) of one sequence over its first `length` cached positions.

    q [n, H, D] is at the positions from `first` on. `table` holds the sequence's pages. `form` says how the cache
    stores keys and values.
    """
    k, v, places = cached_keys(kv, form, table, mask, first, length, wide(q[:0]).dtype)
    queries = torch.arange(first, first + q.shape[0], device=q.device)
    return _attend_part(q, k, v, mask.seen(queries, places), scale, soft_cap, sinks, scales)


def _fake(*args: Any, cached: bool = False, **kwargs: Any) -> Part:
    q = args[0]
    return paged_attention.fake(*args, **kwargs), torch.empty(q.shape[:2], dtype=wide(q[:0]).dtype, device=q.device)


def _form(call: dict[str, Any]) -> CacheForm:
    return CacheForm.of_cache(call["kv"].shape, call["q"].shape[2], call["value_width"], per_token=call["per_token"])


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return sample calls for tests: the calls of `paged_attention`, and one with parts of 2 and of 0 positions."""
    q, kv, table, starts, lens, _ = paged_samples(g, dtype)[0].args
    shared = (q, kv, table, starts, lens, torch.tensor([2, 0], dtype=torch.int32))
    samples = [*paged_samples(g, dtype), Sample(shared, {"scale": 0.35, "mask": "bidirectional"})]
    before = {"mask": "bidirectional", "cached": True}
    return [*samples, Sample(paged_samples(g, dtype)[0].args, {"scale": 0.35, **before})]


def _rowwise(*args: Any, **kwargs: Any) -> Part:
    call = partial_attention.bind(args, kwargs)
    form = _form(call)
    out, lse = _empty(call["q"], form)
    mask, kv_lens = Mask.named(call["mask"]), call["kv_lens"]
    kv_lens = (kv_lens - call["q_lens"] if call["cached"] else kv_lens).tolist()
    options = {name: call[name] for name in ("sinks", "scale", "soft_cap")} | {"scales": CacheScales.of(call)}
    for b, (start, count) in enumerate(zip(call["q_starts"].tolist(), call["q_lens"].tolist(), strict=True)):
        for i in range(count):
            place, row = kv_lens[b] - count + i, slice(start + i, start + i + 1)
            end = min(mask.end(place), kv_lens[b])
            found = _part_of_pages(
                own_row(call["q"], start + i), call["kv"], form, call["page_table"][b], place, end, mask=mask, **options
            )
            out[row], lse[row] = found
    return out, lse


def _costliest(*args: Any, **kwargs: Any) -> Part:
    """Allocate the most memory that a call of `partial_attention` can need. The memory planner measures it.

    The worst case is that all tokens belong to one sequence. Its length is chosen so that it reads most of the cache.
    The results only have the right shapes.
    """
    call = partial_attention.bind(args, kwargs)
    form = _form(call)
    out, lse = _empty(call["q"], form)
    mask, table = Mask.named(call["mask"]), call["page_table"]
    count, length = longest_read(call["q"].shape[0], table.shape[1], call["kv"].shape[2], mask)
    options = {name: call[name] for name in ("sinks", "scale", "soft_cap")} | {"scales": CacheScales.of(call)}
    found = _part_of_pages(call["q"][:count], call["kv"], form, table[0], length - count, length, mask=mask, **options)
    out[:count], lse[:count] = found
    return out, lse


def _flops(*args: Any, cached: bool = False, **kwargs: Any) -> float:
    assert callable(paged_attention.flops)
    return float(paged_attention.flops(*args, **kwargs))


def _traffic(*args: Any, cached: bool = False, **kwargs: Any) -> dict[str, float]:
    assert paged_attention.traffic is not None
    found: dict[str, float] = paged_attention.traffic(*args, **kwargs)
    return found


def _placement(call: Call) -> Fit:
    return heads_over(call, "kv", 3, {"q": 1, "sinks": 0}, with_lse=True)


def _merge_placement(call: Call) -> Fit:
    names = ("one", "one_lse", "other", "other_lse")
    return by_heads(call, dict.fromkeys(names, 1), (call.shard(1), call.shard(1)))


@define(
    samples=_samples,
    rows=("q",),
    rowwise=_rowwise,
    fake=_fake,
    flops=_flops,
    traffic=_traffic,
    costliest=_costliest,
    fusible=False,
    needs_kernel=True,
    legal="cached",
    effect=Effect.READS_STATE,
    placement=_placement,
)
def partial_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
    cached: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (attention [T, H, V], log-sum-exp f32[T, H]) of q [T, H, D] over a part of each sequence's positions.

    The op `merge_attention` merges two such parts. The part of sequence b is `kv_lens[b]` positions in the pages
    `page_table[b]`; with `cached`, those without the last `q_lens[b]`, which are the step's own tokens. The other
    arguments are explained at `paged_attention`. Pass `sinks` to one of the two parts only. A token that sees nothing
    gets attention 0 and log-sum-exp -inf.

    With the mask "bidirectional", the part may be any positions that all tokens see. With masks that depend on
    distances, such as "causal", it must be the end of the sequence. It may be shorter than the step's tokens of the
    sequence. ALiBi slopes are not supported, because the op does not know where the part is in its sequence.
    """
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    out, lse = _empty(q, form)
    by, scales = Mask.named(mask), CacheScales(k_scale, v_scale, per_token)
    kv_lens = kv_lens - q_lens if cached else kv_lens
    for b, (start, count, length) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)):
        if count:
            row = slice(start, start + count)
            place = (page_table[b], length - count, length)
            found = _part_of_pages(q[row], kv, form, *place, sinks, scale, by, soft_cap, scales)
            out[row], lse[row] = found
    return out, lse


def _merge_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    one, other = (torch.randn(5, 4, 8, generator=g).to(dtype) for _ in range(2))
    one_lse, other_lse = (3 * torch.randn(5, 4, generator=g) for _ in range(2))
    one_lse[1], other_lse[2] = float("-inf"), float("-inf")
    one_lse[3], other_lse[3] = float("-inf"), float("-inf")
    return [Sample((one, one_lse, other, other_lse))]


@define(
    samples=_merge_samples,
    rows=("one", "one_lse", "other", "other_lse"),
    fake=lambda one, one_lse, *_: (torch.empty_like(one), torch.empty_like(one_lse)),
    flops=lambda one, *_: 3 * one.numel(),
    placement=_merge_placement,
)
def merge_attention(
    one: torch.Tensor, one_lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention over two disjoint parts: return (attention [T, H, D], log-sum-exp f32[T, H]) over both.

    `one` and `other` are the attention over each part. `one_lse` and `other_lse` are their log-sum-exps. A log-sum-exp
    of -inf means that the token sees nothing of the part. If it sees nothing of both parts, the attention is 0.
    """
    peak = torch.maximum(one_lse, other_lse).clamp(min=torch.finfo(one_lse.dtype).min)
    one_share, other_share = (one_lse - peak).exp(), (other_lse - peak).exp()
    total = one_share + other_share
    both = wide(one) * one_share[..., None] + wide(other) * other_share[..., None]
    merged = both / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
    return merged.to(one.dtype), peak + total.log()
