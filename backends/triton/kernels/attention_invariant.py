"""Attention whose bits depend on a token's own context alone: one kernel for decoding and for prompts.

    for each tile (tokens of one sequence times the heads of q of one head of k and v), by `ways` programs:
        for each split of the positions that the tile sees, in turns of the programs:
            part = the state after the split's blocks of keys, from a fresh one
            if one program has the tile: join part to the state, which begins with the sink
            else: write part
        if there are several programs: the last of them to end joins all parts, from the first one on
        write the attention

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
    ended_before,
    first_seen,
    forgets,
    leave,
    leave_nothing,
    mean_of,
    owned_between,
    slopes_of,
    tail_of,
    unowned,
)


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


@triton.jit
def _leave_part(partial, sizes, at, g, own, part, part_sum, part_peak, FORM: tl.constexpr):
    """Write the state of a split's rows, heads `g` [M] of the places `at` [M], where `own` [M]."""
    e = tl.arange(0, FORM.block_value)
    here = at * FORM.group + g
    held = own[:, None] & (e < FORM.value_dim)[None, :]
    tl.store(partial + here[:, None] * FORM.value_dim + e[None, :], part, mask=held)
    here = at * (2 * FORM.group) + g
    tl.store(sizes + here, part_sum, mask=own)
    tl.store(sizes + here + FORM.group, part_peak, mask=own)


@triton.jit
def _part_left(partial, sizes, at, g, own, FORM: tl.constexpr):
    """What `_leave_part` wrote. Other multiprocessors did so during this launch: it is read past the first cache."""
    e = tl.arange(0, FORM.block_value)
    here = at * FORM.group + g
    held = own[:, None] & (e < FORM.value_dim)[None, :]
    part = tl.load(partial + here[:, None] * FORM.value_dim + e[None, :], mask=held, other=0.0, cache_modifier=".cg")
    here = at * (2 * FORM.group) + g
    part_sum = tl.load(sizes + here, mask=own, other=0.0, cache_modifier=".cg")
    part_peak = tl.load(sizes + here + FORM.group, mask=own, other=LOWEST, cache_modifier=".cg")
    return part, part_sum, part_peak


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
    slopes,
    tokens,
    sequences,
    width,
    ways,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: kv_heads, blocks of tokens of a sequence, ways; a program without a block ends.

    With more than one way, `partial` f32[tokens, kv_heads, cdiv(width * page, SPLIT), group, value_dim] takes the sums
    of each split, `sizes` f32[tokens, kv_heads, splits, 2, group] its weights' sum and its peak, and `arrived`
    i32[tokens, kv_heads] counts the programs that have ended, at the first token of a tile. `lse` f32[tokens, heads]
    takes the log-sum-exp of each row, where it is asked for.
    """
    MASK: tl.constexpr = SCORES.mask
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    way = tl.program_id(2)
    sequence, block, _ = block_of_item(item, q_lens, sequences, TILE_TOKENS, 1, 32)
    d = tl.arange(0, FORM.block)
    HEADS: tl.constexpr = FORM.kv_heads * FORM.group
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    ROWS: tl.constexpr = TILE_TOKENS * FORM.block_group
    r = tl.arange(0, ROWS)
    g = r % FORM.block_group
    begin = item * TILE_TOKENS
    last = tl.minimum(begin + TILE_TOKENS, tokens)
    if (way == 0) & (owned_between(begin, last, q_starts, q_lens, sequences, 32) < last - begin):
        row = begin + r // FORM.block_group
        free = unowned(row, q_starts, q_lens, sequences) & (row < tokens) & (g < FORM.group)
        leave_nothing(out, lse, 0, row.to(tl.int64) * HEADS + head * FORM.group + g, free, FORM)
    if sequence < 0:
        return

    start = tl.load(q_starts + sequence)
    count = tl.load(q_lens + sequence)
    cached = tl.load(kv_lens + sequence) - count
    nth = block * TILE_TOKENS + r // FORM.block_group
    own = (nth < count) & (g < FORM.group)
    held = own[:, None] & (d < FORM.dim)[None, :]
    token = (start + nth).to(tl.int64)
    heads = head * FORM.group + g
    query = tl.load(q + (token * FED.q.token + heads * FED.q.head)[:, None] + d[None, :], mask=held, other=0.0)
    query_tail = None
    if FORM.tail > 0:
        query_tail = tail_of(q, token * FED.q.token + heads * FED.q.head, own, FORM)
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

    total = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + heads, mask=g < FORM.group, other=0.0).to(tl.float32) * LOG2_E
        weight_sum = tl.full((ROWS,), 1.0, tl.float32)
    row_slopes = slopes_of(slopes, heads, g < FORM.group)
    stored = tl.cdiv(width * CACHE.page, SPLIT)
    pair = (token * FORM.kv_heads + head) * stored
    for split in range(first + way, splits, sharing):
        part = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
        part_sum = tl.zeros((ROWS,), tl.float32)
        part_peak = tl.full((ROWS,), LOWEST, tl.float32)
        part, part_sum, part_peak = attended(
            part, part_sum, part_peak, query, query_tail, places, kv, pages, head,
            tl.maximum(split * SPLIT, low), tl.minimum((split + 1) * SPLIT, end), BLOCK_N,
            BLOCK_N, MASK, True, SCORES, CACHE, FORM, slopes=row_slopes,
        )  # fmt: skip
        if sharing == 1:
            total, weight_sum, peak = _joined(total, weight_sum, peak, part, part_sum, part_peak)
        else:
            _leave_part(partial, sizes, pair + split, g, own, part, part_sum, part_peak, FORM)
    if sharing > 1:
        counter = arrived + (start + block * TILE_TOKENS) * FORM.kv_heads + head
        if ended_before(counter) < sharing - 1:
            return
        tl.store(counter, 0)
        for split in range(first, splits):
            part, part_sum, part_peak = _part_left(partial, sizes, pair + split, g, own, FORM)
            total, weight_sum, peak = _joined(total, weight_sum, peak, part, part_sum, part_peak)
    mean = mean_of(total, weight_sum, lse, CACHE)
    leave(out, lse, 0, token * HEADS + heads, own, mean, weight_sum, peak, FORM)
