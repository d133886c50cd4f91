"""Attention over flattened tokens: pure while traced, then over a paged KV cache.

A KV cache is [pages, 2, page, kv_heads, head_dim]: keys at index 0 of the second axis, values at 1. A slot is
`page * page_size + offset`.
"""

import torch

from ingot.ir.ops.registry import Effect, Sample, bytes_of, define, nothing, own_row, wide


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention of q [n, H, D] over k, v [m, KV, D] with mask [n, m] (True: attend): [n, H, D]."""
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = wide(q).view(q.shape[0], kv_heads, heads // kv_heads, q.shape[2])
    scores = torch.einsum("nkgd,mkd->kgnm", grouped, wide(k)) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        # A logit of its own for each head, which takes its share of the softmax and has no value.
        sink = wide(sinks).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("kgnm,mkd->nkgd", weights, wide(v)).reshape(q.shape).to(q.dtype).contiguous()


def _seen(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool[n, m]: a query sees the keys up to itself, with a window only the last `window` of them."""
    behind = q_positions[:, None] - k_positions[None, :]
    seen = behind >= 0
    return seen if window is None else seen & (behind < window)


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    positions = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    seqs = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    args = (randn(5, 6, 16), randn(5, 2, 16), randn(5, 2, 16), positions, seqs)
    plain = {"scale": 0.25, "layer": 0}
    ungrouped = (randn(5, 2, 16), *args[1:])
    return [
        Sample(args, plain),
        Sample((*args, randn(6)), {**plain, "window": 2, "soft_cap": 3.0}),
        Sample(ungrouped, plain),
    ]


def _attention_rowwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    layer: int,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for i in range(q.shape[0]):
        seen = (token_seqs == token_seqs[i]) & _seen(positions[i : i + 1], positions, window)[0]
        one = torch.ones(1, int(seen.sum()), dtype=torch.bool, device=q.device)
        out[i : i + 1] = _attend(own_row(q, i), k[seen], v[seen], one, scale, soft_cap, sinks)
    return out


def _attention_flops(q: torch.Tensor, k: torch.Tensor, *_: object, **__: object) -> int:
    return 4 * q.numel() * k.shape[0]  # an upper bound: as if all tokens were one unmasked sequence


@define(
    samples=_samples,
    rows=("q",),
    rowwise=_attention_rowwise,
    fake=lambda q, *_, **__: torch.empty_like(q, memory_format=torch.contiguous_format),
    flops=_attention_flops,
    fusible=False,
    legal="pure",
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    layer: int,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence; q [T, H, D], k and v [T, KV, D], H a multiple of KV: [T, H, D].

    `token_seqs` [T] tells the sequence of a token and `positions` [T] its place there. `layer` names the cache that
    the op will get; it does not change the result. `window` counts the positions that a token sees, itself included.
    `soft_cap` bounds the scores as the op of that name does. `sinks` [H] are logits that join the softmax of each head.
    """
    mask = (token_seqs[:, None] == token_seqs[None, :]) & _seen(positions, positions, window)
    return _attend(q, k, v, mask, scale, soft_cap, sinks)


def _kv_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    kv = torch.randn(4, 2, 16, 2, 8, generator=g).to(dtype)
    k, v = (torch.randn(3, 2, 8, generator=g).to(dtype) for _ in range(2))
    return [Sample((kv, k, v, torch.tensor([17, 63, -1])))]


def _write(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    if bool((slots < 0).any()):  # padding
        keep = slots >= 0
        k, v, slots = k[keep], v[keep], slots[keep]
    _write_real(kv, k, v, slots)


def _write_real(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    page_size = kv.shape[2]
    page, offset = slots // page_size, slots % page_size
    kv[:, 0].index_put_((page, offset), k)
    kv[:, 1].index_put_((page, offset), v)


def _write_padded(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """What `_write` comes to when a slot is padding: it takes the others out first."""
    _write_real(kv, k.clone(), v.clone(), slots.clone())


@define(
    samples=_kv_samples,
    fake=lambda kv, k, v, slots: torch.empty_like(kv),
    states=("kv",),
    in_place=_write,
    costliest=_write_padded,
    flops=nothing,
    # Of the cache, what is written.
    traffic=lambda kv, k, v, slots: 2 * bytes_of(k, v) + bytes_of(slots),
    fusible=False,
)
def kv_append(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The cache with k, v [T, KV, D] written at slots i64[T]; a negative slot is padding and writes nothing."""
    result = kv.clone()
    _write(result, k, v, slots)
    return result


def _paged_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    kv = torch.randn(6, 2, 16, 2, 8, generator=g).to(dtype)
    q = torch.randn(4, 4, 8, generator=g).to(dtype)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    table = torch.tensor([[3, 0], [5, 1]], dtype=torch.int32)
    args = (q, kv, table, ints(0, 3), ints(3, 1), ints(20, 9))
    sinks = torch.randn(4, generator=g).to(dtype)
    return [
        Sample(args, {"scale": 0.35}),
        Sample((*args, sinks), {"scale": 0.35, "window": 5, "soft_cap": 2.0}),
    ]


def _paged_rowwise(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    zero, one = q_starts.new_zeros(1), q_starts.new_ones(1)
    for b, (start, count, length) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)):
        for i in range(count):
            seen = zero + (length - count + i + 1)
            out[start + i : start + i + 1] = paged_attention.reference(
                own_row(q, start + i),
                kv,
                page_table[b : b + 1],
                zero,
                one,
                seen,
                sinks,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
            )
    return out


def _positions_seen(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, window: int | None
) -> tuple[float, float]:
    """(keys that a token sees on average, positions read of each sequence) when every page of the table is full, and
    all sequences feed as many tokens as others, at their ends."""
    length = page_table.shape[1] * kv.shape[2]
    count = min(q.shape[0] / page_table.shape[0], length)
    if window is None:
        return length - (count - 1) / 2, length
    # The last token sees `window` keys, and each one before it one key that those after it do not.
    full = max(0.0, min(count, length - window + 1))  # tokens with a whole window in front of them
    ends = (count - full) * (length - count + 1 + length - full) / 2  # the others see all that there is
    return (full * window + ends) / count, min(length, window + count - 1)


def _paged_flops(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, *_: object, window: int | None = None, **__: object
) -> float:
    """Two products, of q with keys and of weights with values."""
    return 4 * q.numel() * _positions_seen(q, kv, page_table, window)[0]


def _paged_traffic(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    *rest: torch.Tensor | None,
    window: int | None = None,
    **_: object,
) -> float:
    a_position = bytes_of(kv[:1, :, :1])  # its keys and its values
    read = page_table.shape[0] * _positions_seen(q, kv, page_table, window)[1] * a_position
    return 2 * bytes_of(q) + read + bytes_of(page_table, *rest)


def _attend_pages(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    length: int,
    sinks: torch.Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of one sequence: q [n, H, D] are the last of `length` positions in the pages of `table` [P]."""
    count, page_size = q.shape[0], kv.shape[2]
    # Pages that lie wholly before the first token's window are not even read.
    first = 0 if window is None else max(0, length - count - window + 1) // page_size
    pages = kv.index_select(0, table[first : -(-length // page_size)])
    places = torch.arange(first * page_size, length, device=q.device)
    k, v = (pages[:, part].flatten(0, 1)[: places.shape[0]] for part in (0, 1))
    return _attend(q, k, v, _seen(places[-count:], places, window), scale, soft_cap, sinks)


def longest_read(tokens: int, pages: int, page_size: int, window: int | None) -> tuple[int, int]:
    """(tokens fed, positions cached) of the sequence in a step of `tokens` that reads most of its `pages`."""
    length = pages * page_size
    count = min(tokens, length)
    if window is not None:
        # The first position that is seen is the last one of its page: all of that page is read.
        beyond = (length - count - window + 2) % page_size
        if length - count - window + 1 > beyond and length - beyond >= count:
            length -= beyond
    return count, length


def _paged_costliest(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """All tokens are of one sequence at the end of its pages."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    count, length = longest_read(q.shape[0], page_table.shape[1], kv.shape[2], window)
    out[:count] = _attend_pages(q[:count], kv, page_table[0], length, sinks, scale, window, soft_cap)
    return out


@define(
    samples=_paged_samples,
    rows=("q",),
    rowwise=_paged_rowwise,
    fake=lambda q, *_, **__: torch.empty_like(q, memory_format=torch.contiguous_format),
    flops=_paged_flops,
    traffic=_paged_traffic,
    costliest=_paged_costliest,
    fusible=False,
    legal="cached",
    effect=Effect.READS_STATE,
)
def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] over the pages of each sequence: [T, H, D].

    Sequence b owns tokens `q_starts[b] … + q_lens[b]`, which are the last of its `kv_lens[b]` cached positions;
    position p lies in page `page_table[b, p // page_size]`. Rows of no sequence come out zero. `sinks`, `window` and
    `soft_cap` are those of `attention`.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for b, (start, count, length) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)):
        if count:
            row = slice(start, start + count)
            out[row] = _attend_pages(q[row], kv, page_table[b], length, sinks, scale, window, soft_cap)
    return out
