"""Prefill attention, for sequences with many tokens in a step: a program takes blocks of a sequence's tokens, for one
head.

    write zeros to the rows of padding tokens in the program's share
    for each block of tokens of a sequence, the last one first, and q head:
        query = the q of the block's tokens; state = the sink
        for every block of keys that all rows see: add it to the state
        for every block of keys that some rows see: add it to the state, with the mask
        write the attention

The number of blocks follows from the lengths, on the device. The programs loop over the blocks, with the size of the
grid as stride.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.parts import (
    attended,
    block_of_item,
    end_seen,
    first_seen,
    forgets,
    owned_between,
    store_rows,
    store_unowned,
    tail_of,
    unowned,
)
from ingot.backends.triton.kernels.attention.softmax import LOG2_E, LOWEST, mean_of, slopes_of


@triton.jit(do_not_specialize=["tokens", "sequences", "width"])
def prefill_attention(
    out,
    lse,
    kv,
    q,
    page_table,
    q_starts,
    q_lens,
    kv_lens,
    sinks,
    slopes,
    ancestors,
    tokens,
    sequences,
    width,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    SCAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute prefill attention over a paged KV cache, for sequences with at least LEAST tokens in the step.

    The arguments `kv` to `ancestors` are those of the op `paged_attention`. Grid: heads, programs that loop over blocks
    of BLOCK_M tokens of a sequence. The later blocks of a sequence begin first, because they see more keys.

    The grid has at least cdiv(tokens, BLOCK_M) programs per head. Program i also writes zeros for padding among the
    i-th BLOCK_M tokens of the step. Rows of sequences with fewer than LEAST tokens are not written. `lse` f32[tokens,
    heads], unless None, receives the log-sum-exp of each row.
    """
    MASK: tl.constexpr = SCORES.mask
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    d = tl.arange(0, FORM.block)
    HEADS: tl.constexpr = FORM.kv_heads * FORM.group
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    first = item * BLOCK_M
    last = tl.minimum(first + BLOCK_M, tokens)
    if owned_between(first, last, q_starts, q_lens, sequences, SCAN) < last - first:
        row = first + tl.arange(0, BLOCK_M)
        free = unowned(row, q_starts, q_lens, sequences) & (row < tokens)
        store_unowned(out, lse, 0, row.to(tl.int64) * HEADS + head, free, FORM)
    sequence, block, blocks = block_of_item(item, q_lens, sequences, BLOCK_M, LEAST, SCAN)
    while sequence >= 0:
        start = tl.load(q_starts + sequence)
        count = tl.load(q_lens + sequence)
        cached = tl.load(kv_lens + sequence) - count
        nth = block * BLOCK_M + tl.arange(0, BLOCK_M)
        fed = nth < count
        row = (start + nth).to(tl.int64)
        from_q = row * FED.q.token + head * FED.q.head
        held = fed[:, None] & (d < FORM.dim)[None, :]
        query = tl.load(q + from_q[:, None] + d[None, :], mask=held, other=0.0)
        query_tail = None
        if FORM.tail > 0:
            query_tail = tail_of(q, from_q, fed, FORM)
        places = cached + nth
        bits = None
        if ancestors is not None:
            bits = tl.load(ancestors + row, mask=fed, other=0)
        total = tl.zeros((BLOCK_M, BLOCK_VALUE), tl.float32)
        weight_sum = tl.zeros((BLOCK_M,), tl.float32)
        peak = tl.full((BLOCK_M,), LOWEST, tl.float32)
        if sinks is not None:
            peak = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
            weight_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
        pages = page_table + sequence.to(tl.int64) * width
        row_slopes = slopes_of(slopes, head + tl.zeros((BLOCK_M,), tl.int32), fed)
        low = 0
        if forgets(MASK):
            low = first_seen(cached + block * BLOCK_M, MASK)
        # First the keys that all rows see, then those that some rows see.
        seen_by_all = cached if MASK == "tree" else end_seen(cached + block * BLOCK_M, cached + count, MASK)
        middle = low + tl.maximum(seen_by_all - low, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(end_seen(cached + (block + 1) * BLOCK_M - 1, cached + count, MASK), cached + count)
        total, weight_sum, peak = attended(
            total, weight_sum, peak, query, query_tail, places, kv, pages, head // FORM.group, low, middle, BLOCK_N,
            BLOCK_N, MASK, False, SCORES, CACHE, FORM, ASSEMBLY, slopes=row_slopes,
        )  # fmt: skip
        total, weight_sum, peak = attended(
            total, weight_sum, peak, query, query_tail, places, kv, pages, head // FORM.group, middle, end, BLOCK_N,
            BLOCK_N, MASK, True, SCORES, CACHE, FORM, ASSEMBLY, bits, cached, row_slopes,
        )  # fmt: skip
        store_rows(out, lse, 0, row * HEADS + head, fed, mean_of(total, weight_sum, lse, CACHE), weight_sum, peak, FORM)
        item += tl.num_programs(1)
        sequence = -1
        if item < blocks:
            sequence, block, blocks = block_of_item(item, q_lens, sequences, BLOCK_M, LEAST, SCAN)
