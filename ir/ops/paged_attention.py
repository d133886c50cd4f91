"""Attention over the paged KV cache, which `kv_append` writes."""

from functools import cache

import torch

from ingot.ir.cache.dtype import CacheScales, as_movable, check_cache_dtype, is_narrow
from ingot.ir.cache.form import CacheForm
from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.ops.attention import (
    attend,
    check_mask,
    check_slopes,
    distance_bias,
    flops_of,
    heads_over,
    result_of,
    seen_in_step,
    slopes_sample,
)
from ingot.ir.ops.registry import Effect, Sample, bytes_of, define, own_row, wide
from ingot.ir.placements import Call, Fit


def _paged_placement(call: Call) -> Fit:
    return heads_over(call, "kv", 3, {"q": 1, "sinks": 0, "slopes": 0})


def paged_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return sample calls of `paged_attention` for tests.

    They have two sequences with 3 tokens and 1 token in the step.
    """
    kv = torch.randn(6, 2, 16, 2, 8, generator=g).to(dtype)
    q = torch.randn(4, 4, 8, generator=g).to(dtype)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    table = torch.tensor([[3, 0], [5, 1]], dtype=torch.int32)
    args = (q, kv, table, ints(0, 3), ints(3, 1), ints(20, 9))
    sinks = torch.randn(4, generator=g).to(dtype)
    return [
        Sample(args, {"scale": 0.35}),
        Sample((*args, sinks), {"scale": 0.35, "mask": "window_5", "soft_cap": 2.0}),
        *(Sample(args, {"scale": 0.35, "mask": mask}) for mask in ("chunked_6", "bidirectional", "block_causal_4")),
        *other_forms(args, g),
    ]


def other_forms(args: tuple[torch.Tensor, ...], g: torch.Generator) -> list[Sample]:
    """Return sample calls of `paged_attention` with two other cache shapes.

    In one cache, keys and values have different widths. In the other, values are a part of the keys. `args` are the
    arguments of a sample call. The new calls replace only its cache.
    """
    q, kv, *lens = args
    pages, _, page, heads, dim = kv.shape
    two_widths, shared = (torch.randn(pages, 1, page, heads, row, generator=g).to(kv.dtype) for row in (dim + 5, dim))
    return [
        Sample((q, two_widths, *lens), {"scale": 0.35, "mask": "window_5"}),
        Sample((q, shared, *lens), {"scale": 0.35, "value_width": dim - 2}),
    ]


def _paged_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return sample calls of `paged_attention` that together use all of its arguments.

    They are the calls of `paged_samples`, and calls with a tree of drafts, with a shared first page, and with ALiBi
    slopes.
    """
    found = paged_samples(g, dtype)
    tree = Sample((*found[0].args, None, torch.tensor([1, 3, 5, 0])), {"scale": 0.35, "mask": "tree"})
    kv = torch.randn(6, 2, 16, 2, 8, generator=g).to(dtype)
    q = torch.randn(3, 4, 8, generator=g).to(dtype)
    rows = ([[3, 0], [5, 1], [3, 2]], [0, 1, 2], [1, 1, 1], [20, 9, 31])
    sharing = [[16, 0, 0, 2, 16, 0], [0, 2, 0, 0, 0, 0], [16, 0, 0, 0, 0, 0]]
    table, starts, counts, lens, shared = (torch.tensor(one, dtype=torch.int32) for one in (*rows, sharing))
    sharing_prefixes = (q, kv, table, starts, counts, lens, None, None, shared)
    return [
        *found,
        tree,
        Sample(sharing_prefixes, {"scale": 0.35}),
        Sample((*sharing_prefixes, slopes_sample(4)), {"scale": 0.35}),
        Sample((*found[1].args, None, None, slopes_sample(4)), found[1].kwargs),
        Sample((*found[0].args, None, None, None, slopes_sample(4)), {"scale": 0.35, "mask": "bidirectional"}),
    ]


def _paged_rowwise(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    sharing: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *,
    scale: float,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> torch.Tensor:
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    out = result_of(q, form).zero_()
    by, scales = Mask.named(mask), CacheScales(k_scale, v_scale, per_token)
    for b, (start, count, length) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)):
        for i in range(count):
            position = length - count + i
            end = min(by.end(position), length)
            k, v, places = cached_keys(kv, form, page_table[b], by, position, end, wide(q[:0]).dtype)
            own = torch.tensor([position], device=q.device)
            row = slice(start + i, start + i + 1)
            seen = seen_in_step(by, own, places, None if ancestors is None else ancestors[row], length - count)
            bias = distance_bias(q, slopes, own, places)
            out[row] = attend(own_row(q, start + i), k, v, seen, scale, soft_cap, sinks, scales, bias)
    return out


def _positions_seen(q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, mask: str) -> tuple[float, float]:
    """Estimate (average number of keys that a token sees, positions that a call reads per sequence).

    Assumes that each sequence fills its pages in `page_table`. Also assumes that all sequences have equally many tokens
    in the step, at their ends.
    """
    length = page_table.shape[1] * kv.shape[2]
    count = min(q.shape[0] / page_table.shape[0], length)
    by = Mask.named(mask)
    if by.looks_ahead:
        return length, length
    if by.kind == "chunked":
        seen = _seen_in_chunks(length, by.size) - _seen_in_chunks(length - count, by.size)
        return seen / count, length - (length - count) // by.size * by.size
    if by.kind in ("causal", "tree"):  # an upper bound for a tree
        return length - (count - 1) / 2, length
    # The last token sees a whole window of keys. Each token before it adds one key that later ones do not see.
    full = max(0.0, min(count, length - by.size + 1))  # tokens that see a whole window
    ends = (count - full) * (length - count + 1 + length - full) / 2  # the others see all positions up to their own
    return (full * by.size + ends) / count, min(length, by.size + count - 1)


def _seen_in_chunks(length: float, size: int) -> float:
    """Return how many keys the first `length` tokens of a sequence see in all, with a chunked mask.

    A token sees the keys of its chunk up to its position. A chunk has `size` positions.
    """
    rest = length % size
    return length // size * (size * (size + 1) / 2) + rest * (rest + 1) / 2


def _paged_fake(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    sharing: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *_: object,
    mask: str = CAUSAL.name,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
    **__: object,
) -> torch.Tensor:
    check_mask(mask, ancestors, slopes)
    check_slopes(q, slopes)
    check_cache_dtype(kv, q, CacheScales(k_scale, v_scale, per_token))
    return result_of(q, CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token))


def _paged_flops(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    *_: object,
    mask: str = CAUSAL.name,
    value_width: int | None = None,
    per_token: bool = False,
    **__: object,
) -> float:
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    return flops_of(q, form) * _positions_seen(q, kv, page_table, mask)[0]


def _paged_traffic(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    *_: torch.Tensor | None,
    mask: str = CAUSAL.name,
    **__: object,
) -> dict[str, float]:
    a_position = bytes_of(kv[:1, :, :1])  # its keys and its values
    return {"kv": page_table.shape[0] * _positions_seen(q, kv, page_table, mask)[1] * a_position}


def cached_keys(
    kv: torch.Tensor,
    form: CacheForm,
    table: torch.Tensor,
    mask: Mask,
    first: int,
    end: int,
    scaled: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read one sequence from the cache: (keys [m, KV, D], values [m, KV, V], positions [m]).

    `form` says how the cache stores keys and values. `table` [P] holds the sequence's pages. Queries are at position
    `first` and later. Pages that none of them sees, by `mask`, are skipped. The positions run from the start of the
    first page that is read to `end` (exclusive).

    If the cache has scales per token, keys and values are multiplied by them, in the dtype `scaled`.
    """
    page_size = kv.shape[2]
    page = max(0, mask.first(first)) // page_size
    pages = as_movable(kv).index_select(0, table[page : -(-end // page_size)]).view(kv.dtype)
    places = torch.arange(page * page_size, end, device=kv.device)
    k, v = keys_of_pages(pages, form, places.shape[0], scaled)
    return k, v, places


def keys_of_pages(
    pages: torch.Tensor, form: CacheForm, count: int, scaled: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys [count, KV, D] and values [count, KV, V] of the first `count` positions of some pages of a cache.

    If the cache has scales per token, keys and values are multiplied by them, in the dtype `scaled`.
    """
    k, v = (part.flatten(0, 1)[:count] for part in (form.keys(pages), form.values(pages)))
    if form.per_token and is_narrow(pages.dtype):
        scales = (part.flatten(0, 1)[:count, :, None] for part in (form.key_scales(pages), form.value_scales(pages)))
        k, v = (part.to(scaled) * scale.to(scaled) for part, scale in zip((k, v), scales, strict=True))
    return k, v


def _attend_pages(
    q: torch.Tensor,
    kv: torch.Tensor,
    form: CacheForm,
    table: torch.Tensor,
    length: int,
    sinks: torch.Tensor | None,
    scale: float,
    mask: Mask,
    soft_cap: float | None,
    ancestors: torch.Tensor | None,
    scales: CacheScales,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention [n, H, V] of one sequence of `length` positions, for its last n tokens q [n, H, D].

    `table` [P] holds the sequence's pages in the cache `kv`. `form` says how the cache stores keys and values.
    """
    cached = length - q.shape[0]
    k, v, places = cached_keys(kv, form, table, mask, cached, length, wide(q[:0]).dtype)
    queries = places[-q.shape[0] :]
    seen = seen_in_step(mask, queries, places, ancestors, cached)
    return attend(q, k, v, seen, scale, soft_cap, sinks, scales, distance_bias(q, slopes, queries, places))


@cache
def longest_read(tokens: int, pages: int, page_size: int, mask: Mask) -> tuple[int, int]:
    """Return (tokens in the step, length) of the sequence that reads the most of the cache in one call.

    A call has `tokens` tokens, and a sequence has at most `pages` pages. The memory planner assumes this worst case.
    """
    most = pages * page_size
    count = min(tokens, most)
    if not mask.forgets:
        return count, most
    # The result depends on the offset of the first seen position in its page and chunk: try all lengths.
    lengths = range(count, most + 1)
    return count, max(lengths, key=lambda length: length - max(0, mask.first(length - count)) // page_size * page_size)


def _paged_costliest(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    sharing: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *,
    scale: float,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> torch.Tensor:
    """Allocate the most memory that a call of `paged_attention` can need. The memory planner measures it.

    The worst case is that all tokens belong to one sequence. Its length is chosen so that it reads most of the cache.
    The result only has the right shape.
    """
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    out = result_of(q, form).zero_()
    by, scales = Mask.named(mask), CacheScales(k_scale, v_scale, per_token)
    count, length = longest_read(q.shape[0], page_table.shape[1], kv.shape[2], by)
    own = None if ancestors is None else ancestors[:count]
    out[:count] = _attend_pages(
        q[:count], kv, form, page_table[0], length, sinks, scale, by, soft_cap, own, scales, slopes
    )
    return out


@define(
    samples=_paged_samples,
    rows=("q",),
    rowwise=_paged_rowwise,
    fake=_paged_fake,
    flops=_paged_flops,
    traffic=_paged_traffic,
    costliest=_paged_costliest,
    fusible=False,
    needs_kernel=True,
    legal="cached",
    effect=Effect.READS_STATE,
    placement=_paged_placement,
)
def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    sharing: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *,
    scale: float,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
    value_width: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> torch.Tensor:
    """Return the attention [T, H, V] of q [T, H, D] over the keys and values of each sequence in the paged cache `kv`.

    Tokens `q_starts[b]` to `q_starts[b] + q_lens[b]` belong to sequence b. Their positions are the last of its
    `kv_lens[b]` positions. Page `page_table[b, p // page_size]` holds position p. The rows of padding tokens are zero.
    The cache's shape determines V (`ingot.ir.cache.form`). `value_width` is set only if values are the first numbers of
    the keys.

    `mask` says which positions a token sees (`ingot.ir.masks`). `soft_cap` bounds each score to cap * tanh(score /
    cap). `sinks` [H] are extra logits in the softmax of each head. `slopes` f32[H] are the slopes of ALiBi. The mask
    "tree" needs `ancestors` i64[T]: for each token, a bit mask of the step's tokens that it sees. It does not allow
    slopes.

    `sharing` i32[G, 6] says which sequences share a prefix (`ingot.ir.features.sharing`). A backend may read a shared
    prefix once, or ignore `sharing`. `k_scale` and `v_scale` are the scales with which keys and values were written
    (`ingot.ir.cache.dtype`). If values are part of the keys, `v_scale` equals `k_scale`. With `per_token`, scales
    are in the cache.

    Raises VerifyError for an unknown mask, slopes with a tree, or an unknown cache shape. Also raises it if the cache's
    dtype is neither q's nor f8e4m3 nor i8.
    """
    form = CacheForm.of_cache(kv.shape, q.shape[2], value_width, per_token=per_token)
    out = result_of(q, form).zero_()
    by, scales = Mask.named(mask), CacheScales(k_scale, v_scale, per_token)
    for b, (start, count, length) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)):
        if count:
            row = slice(start, start + count)
            own = None if ancestors is None else ancestors[row]
            out[row] = _attend_pages(
                q[row], kv, form, page_table[b], length, sinks, scale, by, soft_cap, own, scales, slopes
            )
    return out
