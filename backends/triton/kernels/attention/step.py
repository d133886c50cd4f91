"""Attention without a cache, for sequences that are in one step as a whole: a program takes blocks of a sequence's
tokens, for one head.

    write zeros to the rows of padding tokens in the program's share
    for each block of tokens of a sequence, the last one first, and q head:
        query = the q of the block's tokens; state = the sink
        for every block of k and v that all rows see: add it to the state
        for every block of k and v that some rows see: add it to the state, with the mask
        write the attention
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.parts import (
    block_of_item,
    end_seen,
    first_seen,
    forgets,
    owned_between,
    seen_by,
    store_rows,
    store_unowned,
    unowned,
)
from ingot.backends.triton.kernels.attention.softmax import LOG2_E, LOWEST, Operands, slopes_of, weighed


@triton.jit
def _joined(
    total,
    weight_sum,
    peak,
    query,
    query_places,
    k,
    v,
    begin,
    end,
    slopes,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    FED: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Add the positions `begin` to `end` - 1 of a sequence to the online-softmax state of M rows, and return the state.

    `k` and `v` point to the sequence's first key and value of one head. `query` is [M, FORM.block], `query_places` [M]
    are the rows' positions, `slopes` [M] their ALiBi slopes (`slopes_of`). AHEAD: some positions may be after the last
    one that a row sees.
    """
    MASK: tl.constexpr = SCORES.mask
    d = tl.arange(0, FORM.block)
    for start in range(begin, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < end
        held = inside[:, None] & (d < FORM.dim)[None, :]
        row = place.to(tl.int64)[:, None]
        keys = tl.load(k + row * FED.k.token + d[None, :], mask=held, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        seen = seen_by(inside[None, :], query_places[:, None], place[None, :], AHEAD, MASK)
        values = tl.load(v + row * FED.v.token + d[None, :], mask=held, other=0.0)
        operands = Operands(slopes=slopes, query_places=query_places, places=place)
        total, weight_sum, peak = weighed(scores, values, total, weight_sum, peak, seen, operands, SCORES)
    return total, weight_sum, peak


@triton.jit(do_not_specialize=["tokens", "sequences"])
def step_attention(
    out,
    q,
    k,
    v,
    q_starts,
    q_lens,
    sinks,
    slopes,
    tokens,
    sequences,
    FED: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `step_attention`: attention among the tokens of each sequence in the step, without a cache.

    Grid: heads, programs that loop over blocks of BLOCK_M tokens of a sequence. The grid has at least cdiv(tokens,
    BLOCK_M) programs per head. Program i also writes zeros for the padding among the i-th BLOCK_M tokens of the step. A
    row reads blocks of keys that depend only on its position in its sequence, so other sequences never change its bits.
    """
    MASK: tl.constexpr = SCORES.mask
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    BLOCK: tl.constexpr = FORM.block
    d = tl.arange(0, BLOCK)
    HEADS: tl.constexpr = FORM.kv_heads * FORM.group
    first = item * BLOCK_M
    last = tl.minimum(first + BLOCK_M, tokens)
    if owned_between(first, last, q_starts, q_lens, sequences, SCAN) < last - first:
        row = first + tl.arange(0, BLOCK_M)
        free = unowned(row, q_starts, q_lens, sequences) & (row < tokens)
        store_unowned(out, None, 0, row.to(tl.int64) * HEADS + head, free, FORM)
    sequence, block, blocks = block_of_item(item, q_lens, sequences, BLOCK_M, 1, SCAN)
    while sequence >= 0:
        start = tl.load(q_starts + sequence).to(tl.int64)
        count = tl.load(q_lens + sequence)
        places = block * BLOCK_M + tl.arange(0, BLOCK_M)
        held = (places < count)[:, None] & (d < FORM.dim)[None, :]
        row = start + places
        query = tl.load(q + row[:, None] * FED.q.token + head * FED.q.head + d[None, :], mask=held, other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
        weight_sum = tl.zeros((BLOCK_M,), tl.float32)
        peak = tl.full((BLOCK_M,), LOWEST, tl.float32)
        if sinks is not None:
            peak = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
            weight_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
        row_slopes = slopes_of(slopes, head + tl.zeros((BLOCK_M,), tl.int32), places < count)
        low = 0
        if forgets(MASK):
            low = first_seen(block * BLOCK_M, MASK)
        # First the keys that all rows see, then those that some rows see.
        seen_by_all = end_seen(block * BLOCK_M, count, MASK)
        middle = low + tl.maximum(seen_by_all - low, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(end_seen((block + 1) * BLOCK_M - 1, count, MASK), count)
        keys = k + start * FED.k.token + head // FORM.group * FED.k.head
        values = v + start * FED.v.token + head // FORM.group * FED.v.head
        total, weight_sum, peak = _joined(
            total, weight_sum, peak, query, places, keys, values, low, middle, row_slopes,
            BLOCK_N, False, FED, FORM, SCORES,
        )  # fmt: skip
        total, weight_sum, peak = _joined(
            total, weight_sum, peak, query, places, keys, values, middle, end, row_slopes,
            BLOCK_N, True, FED, FORM, SCORES,
        )  # fmt: skip
        store_rows(
            out, None, 0, row * HEADS + head, places < count, total / weight_sum[:, None], weight_sum, peak, FORM
        )
        item += tl.num_programs(1)
        sequence = -1
        if item < blocks:
            sequence, block, blocks = block_of_item(item, q_lens, sequences, BLOCK_M, 1, SCAN)
