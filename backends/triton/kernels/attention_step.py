"""Attention of sequences that a step feeds whole: each program takes a block of a sequence's tokens, for one head."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention import (
    LOG2_E,
    LOWEST,
    block_of_item,
    end_seen,
    first_seen,
    forgets,
    owned_between,
    seen_by,
    unowned,
    weighed,
)


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
    K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    AHEAD: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The positions begin … end - 1 of a sequence, whose first keys and values of one head are at `k` and `v`, join the
    state of M rows: `query` [M, BLOCK_DIM] at the positions `query_places` [M]. AHEAD: some may lie after the last one
    that a row sees."""
    d = tl.arange(0, BLOCK_DIM)
    for start in range(begin, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < end
        held = inside[:, None] & (d < DIM)[None, :]
        row = place.to(tl.int64)[:, None]
        keys = tl.load(k + row * K_TOKEN + d[None, :], mask=held, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        seen = seen_by(inside[None, :], query_places[:, None], place[None, :], AHEAD, MASK)
        values = tl.load(v + row * V_TOKEN + d[None, :], mask=held, other=0.0)
        total, weight_sum, peak = weighed(scores, values, total, weight_sum, peak, seen, SCALE, SOFT_CAP)
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
    tokens,
    sequences,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The op `step_attention`. Grid: heads, programs that go round the blocks; no fewer than cdiv(tokens, BLOCK_M),
    since each also writes zeros where no sequence owns a token among BLOCK_M.

    A row's blocks of keys follow from its place in its sequence: what else a step feeds shows in no bit.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    d = tl.arange(0, BLOCK_DIM)
    first = item * BLOCK_M
    last = tl.minimum(first + BLOCK_M, tokens)
    if owned_between(first, last, q_starts, q_lens, sequences, SCAN) < last - first:
        row = first + tl.arange(0, BLOCK_M)
        free = unowned(row, q_starts, q_lens, sequences) & (row < tokens)
        into = out + (row.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
        empty = tl.zeros((BLOCK_M, BLOCK_DIM), out.dtype.element_ty)
        tl.store(into, empty, mask=free[:, None] & (d < DIM)[None, :])
    sequence, block, blocks = block_of_item(item, q_lens, sequences, BLOCK_M, 1, SCAN)
    while sequence >= 0:
        start = tl.load(q_starts + sequence).to(tl.int64)
        count = tl.load(q_lens + sequence)
        places = block * BLOCK_M + tl.arange(0, BLOCK_M)
        held = (places < count)[:, None] & (d < DIM)[None, :]
        row = start + places
        query = tl.load(q + row[:, None] * Q_TOKEN + head * Q_HEAD + d[None, :], mask=held, other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
        weight_sum = tl.zeros((BLOCK_M,), tl.float32)
        peak = tl.full((BLOCK_M,), LOWEST, tl.float32)
        if sinks is not None:
            peak = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
            weight_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
        low = 0
        if forgets(MASK):
            low = first_seen(block * BLOCK_M, MASK)
        # What all rows see, and then what some of them do.
        seen_by_all = end_seen(block * BLOCK_M, count, MASK)
        middle = low + tl.maximum(seen_by_all - low, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(end_seen((block + 1) * BLOCK_M - 1, count, MASK), count)
        keys = k + start * K_TOKEN + head // GROUP * K_HEAD
        values = v + start * V_TOKEN + head // GROUP * V_HEAD
        total, weight_sum, peak = _joined(
            total, weight_sum, peak, query, places, keys, values, low, middle, K_TOKEN, V_TOKEN,
            SCALE, MASK, SOFT_CAP, False, DIM, BLOCK_DIM, BLOCK_N,
        )  # fmt: skip
        total, weight_sum, peak = _joined(
            total, weight_sum, peak, query, places, keys, values, middle, end, K_TOKEN, V_TOKEN,
            SCALE, MASK, SOFT_CAP, True, DIM, BLOCK_DIM, BLOCK_N,
        )  # fmt: skip
        into = out + (row * HEADS + head)[:, None] * DIM + d[None, :]
        tl.store(into, (total / weight_sum[:, None]).to(out.dtype.element_ty), mask=held)
        item += tl.num_programs(1)
        sequence = -1
        if item < blocks:
            sequence, block, blocks = block_of_item(item, q_lens, sequences, BLOCK_M, 1, SCAN)
