"""Attention over chosen positions of a paged KV cache: a token's row of `chosen` lists what it reads.

    for each item (token, split, k/v head), one program:
        count the chosen positions of the token
        for every block of the split's part of the list: add its positions to the state
        if there is one split: write the attention
        else: write the state of the split; the last split to end merges all of them

The state is that of the online softmax. Tokens choose different positions, so a tile has the q heads of one token.
Prefill and decode are the same. Steps of few tokens divide a list among several programs (split-K).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.addresses import cached_head, rows_of
from ingot.backends.triton.kernels.attention.cache_dtype import as_computed, key_scales_of, value_scales_of
from ingot.backends.triton.kernels.attention.constants import group_rows
from ingot.backends.triton.kernels.attention.parts import (
    given_query,
    query_rows,
    store_rows,
    store_unowned,
    tail_of,
)
from ingot.backends.triton.kernels.attention.softmax import LOWEST, Operands, mean_of, weighed
from ingot.backends.triton.kernels.attention.splits import owner_of, store_split


@triton.jit
def _attended(
    total,
    weight_sum,
    peak,
    query,
    query_tail,
    kv,
    listed,
    pages,
    head,
    begin,
    end,
    BLOCK_N: tl.constexpr,
    SCORES: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add the positions `listed[begin]` to `listed[end - 1]` to the online-softmax state of a token's G q heads.

    Return the new state (total, weight_sum, peak). `query` [G, FORM.block] are the q heads and `query_tail` their
    columns from FORM.block on (`tail_of`). `pages` points to the page ids of the token's sequence.
    """
    d = tl.arange(0, FORM.block)
    e = tl.arange(0, FORM.block_value)
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < end
        place = tl.load(listed + at, mask=inside, other=0)
        rows = rows_of(kv, pages, place, inside, cached_head(head, FORM), CACHE)
        held = inside[:, None] & (d < FORM.dim)[None, :]
        keys = as_computed(tl.load(rows[:, None] + d[None, :], mask=held, other=0.0), query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if FORM.tail > 0:
            t = FORM.block + tl.arange(0, FORM.tail)
            ends = tl.load(rows[:, None] + t[None, :], mask=inside[:, None] & (t < FORM.dim)[None, :], other=0.0)
            ends = as_computed(ends, query.dtype)
            scores = tl.dot(query_tail, tl.trans(ends), scores, input_precision="ieee")
        if FORM.same:
            values = keys
        else:
            held = inside[:, None] & (e < FORM.value_dim)[None, :]
            values = tl.load(rows[:, None] + CACHE.part_stride + e[None, :], mask=held, other=0.0)
            values = as_computed(values, query.dtype)
        operands = Operands(
            key_scales=key_scales_of(rows, inside, CACHE), value_scales=value_scales_of(rows, inside, CACHE)
        )
        total, weight_sum, peak = weighed(scores, values, total, weight_sum, peak, inside[None, :], operands, SCORES)
    return total, weight_sum, peak


@triton.jit(do_not_specialize=["sequences", "width"])
def sparse_attention(
    out,
    partial,
    sizes,
    used,
    kv,
    q,
    chosen,
    page_table,
    q_starts,
    q_lens,
    sequences,
    width,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    SPLITS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `sparse_attention`. The arguments `kv` to `q_lens` are the op's.

    A row of `chosen` has LISTED positions. Grid: tokens * SPLITS.most * FORM.kv_heads. A split takes SPLITS.chunk
    adjacent ones of a token's positions. `merge_attention` merges the splits. The scratch memory is what it reads:

    - `partial` f32[tokens, kv_heads, most, group, value_dim]: the attention of each split
    - `sizes` f32[tokens, kv_heads, most, group]: the base-2 logarithm of each split's sum of weights
    - `used` i32[tokens, kv_heads]: the number of splits
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    ROWS: tl.constexpr = group_rows(FORM)
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    item = tl.program_id(0)
    head = item % FORM.kv_heads
    split = item // FORM.kv_heads % SPLITS.most
    token = item // (FORM.kv_heads * SPLITS.most)
    g = tl.arange(0, ROWS)
    own = g < FORM.group
    pair = token * FORM.kv_heads + head
    sequence = owner_of(token, q_starts, q_lens, sequences, SPLITS.scan)
    if sequence < 0:
        if split == 0:
            store_unowned(out, None, pair.to(tl.int64) * FORM.group, g, own, FORM)
            if SPLITS.most > 1:
                tl.store(used + pair, 0)
        return
    listed = chosen + token.to(tl.int64) * LISTED
    nth = tl.arange(0, BLOCK_LISTED)
    count = tl.sum((tl.load(listed + nth, mask=nth < LISTED, other=-1) >= 0).to(tl.int32), 0)
    splits = tl.maximum(tl.cdiv(count, SPLITS.chunk), 1)
    if SPLITS.most > 1:
        tl.store(used + pair, splits, mask=split == 0)
    if split >= splits:
        return
    rows = query_rows(token, head, FED, FORM)
    query = given_query(q, rows, FORM)
    query_tail = None
    if FORM.tail > 0:
        query_tail = tail_of(q, rows, own, FORM)
    total = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    pages = page_table + sequence.to(tl.int64) * width
    begin = split * SPLITS.chunk
    end = tl.minimum(begin + SPLITS.chunk, count)
    total, weight_sum, peak = _attended(
        total, weight_sum, peak, query, query_tail, kv, listed, pages, head, begin, end, BLOCK_N, SCORES, CACHE, FORM
    )
    mean = mean_of(total, weight_sum, None, CACHE)
    if splits == 1:
        store_rows(out, None, pair.to(tl.int64) * FORM.group, g, own, mean, weight_sum, peak, FORM)
        return
    if SPLITS.most > 1:
        inside = own[:, None] & (tl.arange(0, BLOCK_VALUE) < FORM.value_dim)[None, :]
        store_split(partial, sizes, pair.to(tl.int64) * SPLITS.most + split, inside, mean, weight_sum, peak, FORM)
