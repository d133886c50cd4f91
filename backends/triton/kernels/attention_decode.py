"""Attention of steps that feed few tokens: the cached positions of a token are split over programs, to fill the device
however few tokens there are and however their contexts differ.

A work item is (sequence, token of it, head of k and v, split). Grids know no lengths, so each program works out from
them, on the device, how many splits a sequence gets, and which item is its own. All rows of a head's group of q share
one tile. The last split of a (token, head) to end puts the splits together.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention import LOG2_E, LOWEST, attended, unowned, weighed
from ingot.backends.triton.kernels.rope import cache_rows, prepared


@triton.jit
def _read(length, count, WINDOW: tl.constexpr, APPEND: tl.constexpr):
    """Cached positions that the first of a sequence's `count` tokens reads of `length`; fed ones are not read where
    they are appended."""
    read = length - count if APPEND else length
    if WINDOW is not None:
        read = tl.minimum(read, WINDOW)
    return read


@triton.jit
def _splits(read, share, MAX_SPLITS: tl.constexpr):
    """At most one more than read / share: the grid holds the sum over all sequences."""
    return tl.minimum(tl.maximum((read + share // 2) // share, 1), MAX_SPLITS)


@triton.jit
def _own_item(
    item,
    q_lens,
    kv_lens,
    sequences,
    KV_HEADS: tl.constexpr,
    SHARES: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    APPEND: tl.constexpr,
):
    """(sequence of the item or -1, the item's place among those of its sequence, splits there, tokens owned in all)."""
    if sequences == 1:
        owned = tl.load(q_lens)
        read = _read(tl.load(kv_lens), owned, WINDOW, APPEND)
        splits = _splits(read, tl.maximum(tl.cdiv(read * owned, SHARES), MIN_SHARE), MAX_SPLITS)
        place = item
        sequence = tl.where(item < owned * KV_HEADS * splits, 0, -1)
    else:
        # A warp's worth of sequences at a time: reductions then stay within each warp.
        owned = 0
        work = 0
        for first in range(0, sequences, 32):
            b = first + tl.arange(0, 32)
            count = tl.load(q_lens + b, mask=b < sequences, other=0)
            read = _read(tl.load(kv_lens + b, mask=b < sequences, other=0), count, WINDOW, APPEND)
            owned += tl.sum(count)
            work += tl.sum(count * read)
        share = tl.maximum(tl.cdiv(work, SHARES), MIN_SHARE)
        sequence = -1
        place = 0
        splits = 1
        before = 0
        for first in range(0, sequences, 32):
            b = first + tl.arange(0, 32)
            count = tl.load(q_lens + b, mask=b < sequences, other=0)
            read = _read(tl.load(kv_lens + b, mask=b < sequences, other=0), count, WINDOW, APPEND)
            parts = _splits(read, share, MAX_SPLITS)
            items = count * KV_HEADS * parts
            end = before + tl.cumsum(items, 0)
            own = (item >= end - items) & (item < end)
            sequence = tl.maximum(sequence, tl.max(tl.where(own, b, -1)))
            place += tl.sum(tl.where(own, item - (end - items), 0))
            splits += tl.sum(tl.where(own, parts - 1, 0))
            before += tl.sum(items)
    return sequence, place, splits, owned


@triton.jit(do_not_specialize=["tokens", "sequences", "width"])
def decode_attention(
    out,
    partial,
    stats,
    arrived,
    kv,
    q,
    k,
    v,
    positions,
    table,
    slots,
    page_table,
    q_starts,
    q_lens,
    kv_lens,
    q_weight,
    k_weight,
    sinks,
    tokens,
    sequences,
    width,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    APPEND: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tokens + SHARES) * KV_HEADS work items at most; a program without one ends.

    Contexts are cut so that all tokens together have about SHARES shares. `partial` f32[items, GROUP, DIM] and `stats`
    f32[items, 2, GROUP] take what a split computed, `arrived` i32[tokens, KV_HEADS] counts the splits that have ended.

    With APPEND, q and k are normed and rotated first, and k and v of a token go into the cache at its slot. Positions
    fed in this step are then attended to as they come from k and v: no program reads what another one writes here.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.program_id(0)
    sequence, place, splits, owned = _own_item(
        item, q_lens, kv_lens, sequences, KV_HEADS, SHARES, MIN_SHARE, MAX_SPLITS, WINDOW, APPEND
    )
    d = tl.arange(0, BLOCK_DIM)
    if owned < tokens:
        row = item // KV_HEADS + tl.zeros((1,), tl.int32)
        free = unowned(row, q_starts, q_lens, sequences) & (row < tokens)
        g = tl.arange(0, BLOCK_GROUP)
        into = out + ((row * KV_HEADS + item % KV_HEADS) * GROUP * DIM)[:, None] + g[:, None] * DIM + d[None, :]
        tl.store(
            into,
            tl.zeros((BLOCK_GROUP, BLOCK_DIM), out.dtype.element_ty),
            mask=free[:, None] & (g < GROUP)[:, None] & (d < DIM)[None, :],
        )
    if sequence < 0:
        return

    split = place % splits
    head = place // splits % KV_HEADS
    nth = place // splits // KV_HEADS
    first = tl.load(q_starts + sequence)
    count = tl.load(q_lens + sequence)
    length = tl.load(kv_lens + sequence)
    token = first + nth
    cached = length - count
    own_place = cached + nth
    end = cached if APPEND else own_place + 1
    low = 0
    if WINDOW is not None:
        low = tl.maximum(own_place - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), splits), BLOCK_N) * BLOCK_N
    begin = low + split * share
    end = tl.minimum(begin + share, end)

    g = tl.arange(0, BLOCK_GROUP)
    heads = head * GROUP + g
    rows = token.to(tl.int64) * Q_TOKEN + heads * Q_HEAD
    if APPEND:
        position = tl.load(positions + token + tl.zeros((1,), tl.int32))
        query = prepared(q, rows, g < GROUP, position, table, q_weight, EPS, INTERLEAVED, ROTARY, DIM, BLOCK_DIM)
    else:
        query = tl.load(q + rows[:, None] + d[None, :], mask=(g < GROUP)[:, None] & (d < DIM)[None, :], other=0.0)
    total = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    weight_sum = tl.zeros((BLOCK_GROUP,), tl.float32)
    peak = tl.full((BLOCK_GROUP,), LOWEST, tl.float32)
    if sinks is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if split == 0:
            peak = tl.load(sinks + heads, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2_E
            weight_sum = tl.full((BLOCK_GROUP,), 1.0, tl.float32)

    pages = page_table + sequence.to(tl.int64) * width
    places = own_place + tl.zeros((BLOCK_GROUP,), tl.int32)
    # Every cached position from `low` on is seen.
    total, weight_sum, peak = attended(
        total, weight_sum, peak, query, places, kv, pages, head, begin, end,
        SCALE, None, SOFT_CAP, False, PAGE_STRIDE, PART_STRIDE, SLOT_STRIDE, PAGE, DIM, BLOCK_DIM, BLOCK_N,
    )  # fmt: skip
    if APPEND:  # noqa: SIM102
        if split == splits - 1:
            for start in range(0, nth + 1, 16):
                fed = start + tl.arange(0, 16)
                seen = fed <= nth
                if WINDOW is not None:
                    seen = seen & (fed > nth - WINDOW)
                inside = seen[:, None] & (d < DIM)[None, :]
                from_k = (first + fed).to(tl.int64) * K_TOKEN + head * K_HEAD
                from_v = (first + fed).to(tl.int64) * V_TOKEN + head * V_HEAD
                at = tl.load(positions + first + fed, mask=seen, other=0)
                keys = prepared(k, from_k, seen, at, table, k_weight, EPS, INTERLEAVED, ROTARY, DIM, BLOCK_DIM)
                values = tl.load(v + from_v[:, None] + d[None, :], mask=inside, other=0.0)
                scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
                total, weight_sum, peak = weighed(
                    scores, values, total, weight_sum, peak, seen[None, :], SCALE, SOFT_CAP
                )
                slot = tl.load(slots + first + fed, mask=fed == nth, other=-1)
                into = kv + cache_rows(slot, SLOT_STRIDE, PAGE_STRIDE, PAGE) + head * DIM
                written = (slot >= 0)[:, None] & (d < DIM)[None, :]
                tl.store(into[:, None] + d[None, :], keys, mask=written)
                tl.store(into[:, None] + PART_STRIDE + d[None, :], values, mask=written)

    pair = token * KV_HEADS + head
    own = (g < GROUP)[:, None] & (d < DIM)[None, :]
    if splits == 1:
        result = total / weight_sum[:, None]
        tl.store(
            out + pair.to(tl.int64) * (GROUP * DIM) + g[:, None] * DIM + d[None, :],
            result.to(out.dtype.element_ty),
            mask=own,
        )
        return
    tl.store(partial + item * (GROUP * DIM) + g[:, None] * DIM + d[None, :], total, mask=own)
    tl.store(stats + item * (2 * GROUP) + g, peak, mask=g < GROUP)
    tl.store(stats + item * (2 * GROUP) + GROUP + g, weight_sum, mask=g < GROUP)
    # One thread counts for all: what the others stored must be there before, and what it saw hold for them after.
    tl.debug_barrier()
    ended = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if ended == splits - 1:
        tl.store(arrived + pair, 0)
        _combine(
            out,
            partial,
            stats,
            pair,
            item - split,
            splits,
            GROUP,
            DIM,
            BLOCK_DIM,
            BLOCK_HEADS,
            MAX_SPLITS,
            BLOCK_SPLITS,
        )


@triton.jit
def _combine(
    out,
    partial,
    stats,
    pair,
    item,
    splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """The attention of a (token, head) from its splits, which are those from `item` on.

    Other multiprocessors wrote them during this launch: they are read past the first cache.
    """
    g = tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_DIM)
    all_splits = tl.arange(0, MAX_SPLITS)
    held = (all_splits < splits)[:, None] & (g < GROUP)[None, :]
    at = stats + (item + all_splits)[:, None] * (2 * GROUP) + g[None, :]
    peaks = tl.load(at, mask=held, other=LOWEST, cache_modifier=".cg")
    sums = tl.load(at + GROUP, mask=held, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    weight_sum = tl.sum(sums * tl.exp2(peaks - peak[None, :]), 0)
    total = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        s = start + tl.arange(0, BLOCK_SPLITS)
        some = (s < splits)[:, None] & (g < GROUP)[None, :]
        own_peaks = stats + (item + s)[:, None] * (2 * GROUP) + g[None, :]
        share = tl.exp2(tl.load(own_peaks, mask=some, other=LOWEST, cache_modifier=".cg") - peak[None, :])
        own_totals = partial + ((item + s)[:, None] * GROUP + g[None, :])[:, :, None] * DIM + d[None, None, :]
        inside = some[:, :, None] & (d < DIM)[None, None, :]
        parts = tl.load(own_totals, mask=inside, other=0.0, cache_modifier=".cg")
        total += tl.sum(parts * share[:, :, None], 0)
    result = total / weight_sum[:, None]
    into = out + pair.to(tl.int64) * (GROUP * DIM) + g[:, None] * DIM + d[None, :]
    tl.store(into, result.to(out.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < DIM)[None, :])
