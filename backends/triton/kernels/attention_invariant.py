"""Attention whose bits depend on a token's own context alone: one kernel for decoding and for prompts.

Keys are taken in blocks of BLOCK_N at places that are multiples of it, and blocks in splits of SPLIT at multiples of
that. A split is summed up by itself, and splits are put together from the first one on. So what a row adds up, and in
which order, follows from its place. Neither what else a step feeds shows, nor how the prompt was cut: a block that a
row sees nothing of changes none of its bits, since it adds zeros, to sums that are multiplied by one.

Rows of a tile are TILE_TOKENS tokens of one sequence times the heads of q that share a head of k and v. `ways` programs
share the splits of a tile; where that is one, it puts them together as it goes, and else the last of them to end does.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention import (
    LOG2_E,
    LOWEST,
    attended,
    block_of_item,
    end_seen,
    first_seen,
    forgets,
    log_sum_exp,
    mean_of,
    owned_between,
    unowned,
)
from ingot.backends.triton.kernels.cache_form import tail_of


@triton.jit
def _joined(total, weight_sum, peak, part, part_sum, part_peak):
    """The state of rows with that of one more split. What is rounded is spelled out: a compiler may fuse a product and
    a sum in one place and not in another."""
    higher = tl.maximum(peak, part_peak)
    shrunk, share = tl.exp2(peak - higher), tl.exp2(part_peak - higher)
    total = tl.fma(
        part, tl.broadcast_to(share[:, None], total.shape), total * tl.broadcast_to(shrunk[:, None], total.shape)
    )
    return total, tl.fma(part_sum, share, weight_sum * shrunk), higher


@triton.jit(do_not_specialize=["tokens", "sequences", "width", "ways"])
def invariant_attention(
    out,
    lse,
    partial,
    sizes,
    arrived,
    kv,
    q,
    page_table,
    q_starts,
    q_lens,
    kv_lens,
    sinks,
    tokens,
    sequences,
    width,
    ways,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    FORM: tl.constexpr,
):
    """Grid: KV_HEADS, blocks of tokens of a sequence, ways; a program without a block ends.

    With more than one way, `partial` f32[tokens, KV_HEADS, cdiv(width * PAGE, SPLIT), GROUP, V] takes the sums of
    each split (V: numbers of a value), `sizes` f32[tokens, KV_HEADS, splits, 2, GROUP] its weights' sum and its peak,
    and `arrived` i32[tokens, KV_HEADS] counts the programs that have ended, at the first token of a tile. `lse`
    f32[tokens, heads] takes the log-sum-exp of each row, where it is asked for.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    way = tl.program_id(2)
    sequence, block, _ = block_of_item(item, q_lens, sequences, TILE_TOKENS, 1, 32)
    d = tl.arange(0, BLOCK_DIM)
    VALUE_DIM: tl.constexpr = FORM.value_dim
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    e = tl.arange(0, BLOCK_VALUE)
    r = tl.arange(0, TILE_TOKENS * BLOCK_GROUP)
    g = r % BLOCK_GROUP
    begin = item * TILE_TOKENS
    last = tl.minimum(begin + TILE_TOKENS, tokens)
    if (way == 0) & (owned_between(begin, last, q_starts, q_lens, sequences, 32) < last - begin):
        row = begin + r // BLOCK_GROUP
        free = unowned(row, q_starts, q_lens, sequences) & (row < tokens) & (g < GROUP)
        into = out + (row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + g)[:, None] * VALUE_DIM + e[None, :]
        empty = tl.zeros((TILE_TOKENS * BLOCK_GROUP, BLOCK_VALUE), out.dtype.element_ty)
        tl.store(into, empty, mask=free[:, None] & (e < VALUE_DIM)[None, :])
        if lse is not None:
            nothing = tl.full((TILE_TOKENS * BLOCK_GROUP,), float("-inf"), tl.float32)
            tl.store(lse + row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + g, nothing, mask=free)
    if sequence < 0:
        return

    start = tl.load(q_starts + sequence)
    count = tl.load(q_lens + sequence)
    cached = tl.load(kv_lens + sequence) - count
    nth = block * TILE_TOKENS + r // BLOCK_GROUP
    own = (nth < count) & (g < GROUP)
    held = own[:, None] & (d < DIM)[None, :]
    token = (start + nth).to(tl.int64)
    heads = head * GROUP + g
    query = tl.load(q + (token * Q_TOKEN + heads * Q_HEAD)[:, None] + d[None, :], mask=held, other=0.0)
    query_tail = tail_of(q, token * Q_TOKEN + heads * Q_HEAD, own, DIM, BLOCK_DIM, FORM)
    held = own[:, None] & (e < VALUE_DIM)[None, :]
    places = cached + nth
    pages = page_table + sequence.to(tl.int64) * width
    end = tl.minimum(end_seen(cached + (block + 1) * TILE_TOKENS - 1, cached + count, MASK), cached + count)
    low = 0
    if forgets(MASK):
        low = first_seen(cached + block * TILE_TOKENS, MASK) // BLOCK_N * BLOCK_N
    first = low // SPLIT
    splits = tl.cdiv(end, SPLIT)
    sharing = tl.minimum(ways, splits - first)
    if lse is not None:
        sharing = tl.maximum(sharing, 1)  # a tile that sees nothing says so
    if way >= sharing:
        return

    total = tl.zeros((TILE_TOKENS * BLOCK_GROUP, BLOCK_VALUE), tl.float32)
    weight_sum = tl.zeros((TILE_TOKENS * BLOCK_GROUP,), tl.float32)
    peak = tl.full((TILE_TOKENS * BLOCK_GROUP,), LOWEST, tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + heads, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2_E
        weight_sum = tl.full((TILE_TOKENS * BLOCK_GROUP,), 1.0, tl.float32)
    stored = tl.cdiv(width * PAGE, SPLIT)
    pair = (token * KV_HEADS + head) * stored
    for split in range(first + way, splits, sharing):
        part = tl.zeros((TILE_TOKENS * BLOCK_GROUP, BLOCK_VALUE), tl.float32)
        part_sum = tl.zeros((TILE_TOKENS * BLOCK_GROUP,), tl.float32)
        part_peak = tl.full((TILE_TOKENS * BLOCK_GROUP,), LOWEST, tl.float32)
        part, part_sum, part_peak = attended(
            part, part_sum, part_peak, query, query_tail, places, kv, pages, head,
            tl.maximum(split * SPLIT, low), tl.minimum((split + 1) * SPLIT, end), BLOCK_N,
            SCALE, MASK, SOFT_CAP, True, PAGE_STRIDE, PART_STRIDE, SLOT_STRIDE, PAGE, DIM, BLOCK_DIM, BLOCK_N, FORM,
        )  # fmt: skip
        if sharing == 1:
            total, weight_sum, peak = _joined(total, weight_sum, peak, part, part_sum, part_peak)
        else:
            here = (pair + split) * GROUP + g
            tl.store(partial + here[:, None] * VALUE_DIM + e[None, :], part, mask=held)
            here = (pair + split) * (2 * GROUP) + g
            tl.store(sizes + here, part_sum, mask=own)
            tl.store(sizes + here + GROUP, part_peak, mask=own)
    if sharing > 1:
        # One thread counts for all: what the others stored must be there before, and what it saw hold for them after.
        counter = arrived + (start + block * TILE_TOKENS) * KV_HEADS + head
        tl.debug_barrier()
        ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if ended < sharing - 1:
            return
        tl.store(counter, 0)
        # Other multiprocessors wrote them during this launch: they are read past the first cache.
        for split in range(first, splits):
            here = (pair + split) * GROUP + g
            part = tl.load(partial + here[:, None] * VALUE_DIM + e[None, :], mask=held, other=0.0, cache_modifier=".cg")
            here = (pair + split) * (2 * GROUP) + g
            part_sum = tl.load(sizes + here, mask=own, other=0.0, cache_modifier=".cg")
            part_peak = tl.load(sizes + here + GROUP, mask=own, other=LOWEST, cache_modifier=".cg")
            total, weight_sum, peak = _joined(total, weight_sum, peak, part, part_sum, part_peak)
    result = mean_of(total, weight_sum, lse)
    into = out + (token * (KV_HEADS * GROUP) + heads)[:, None] * VALUE_DIM + e[None, :]
    tl.store(into, result.to(out.dtype.element_ty), mask=held)
    if lse is not None:
        tl.store(lse + token * (KV_HEADS * GROUP) + heads, log_sum_exp(weight_sum, peak), mask=own)
