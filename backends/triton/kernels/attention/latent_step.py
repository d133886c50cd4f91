"""Latent attention of the tokens of a step, with keys and values of each head, after a part over cached latents.

    write zeros to the rows of padding tokens in the program's share
    for each block of tokens of a sequence, the last one first, and head:
        query = the q of the block's tokens; state = the part before the step
        for every block of k and v that all rows see: add it to the state
        for every block of k and v that some rows see: add it to the state, with the mask
        write the attention

A key has two tiles: its own part, and the rotated part that all heads share.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.parts import (
    block_of_item,
    owned_between,
    store_rows,
    store_unowned,
    unowned,
)
from ingot.backends.triton.kernels.attention.softmax import LOG2_E, LOWEST, Operands, weighed


@triton.jit
def _joined(
    total,
    weight_sum,
    peak,
    query,
    query_rotated,
    query_places,
    k,
    k_rotated,
    v,
    begin,
    end,
    ROTATED: tl.constexpr,
    ROTATED_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    FED: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Add the positions `begin` to `end` - 1 of a sequence to the online-softmax state of M rows, and return the state.

    `k`, `k_rotated` and `v` point to the sequence's first key and value of one head. `query` [M, FORM.block] and
    `query_rotated` [M, FORM.tail] are the rows, and `query_places` [M] their positions. AHEAD: some positions may be
    after a row's own.
    """
    d = tl.arange(0, FORM.block)
    r = tl.arange(0, FORM.tail)
    e = tl.arange(0, FORM.block_value)
    for start in range(begin, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < end
        row = place.to(tl.int64)[:, None]
        keys = tl.load(k + row * FED.k.token + d[None, :], mask=inside[:, None] & (d < FORM.dim)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        held = inside[:, None] & (r < ROTATED)[None, :]
        ends = tl.load(k_rotated + row * ROTATED_TOKEN + r[None, :], mask=held, other=0.0)
        scores = tl.dot(query_rotated, tl.trans(ends), scores, input_precision="ieee")
        seen = inside[None, :]
        if AHEAD:
            seen = seen & (place[None, :] <= query_places[:, None])
        held = inside[:, None] & (e < FORM.value_dim)[None, :]
        values = tl.load(v + row * FED.v.token + e[None, :], mask=held, other=0.0)
        total, weight_sum, peak = weighed(scores, values, total, weight_sum, peak, seen, Operands(), SCORES)
    return total, weight_sum, peak


@triton.jit(do_not_specialize=["tokens", "sequences"])
def step_latent_attention(
    out,
    q,
    q_rotated,
    k,
    k_rotated,
    v,
    q_starts,
    q_lens,
    before,
    before_lse,
    tokens,
    sequences,
    ROTATED: tl.constexpr,
    Q_ROTATED: tl.constexpr,
    ROTATED_TOKEN: tl.constexpr,
    BEFORE: tl.constexpr,
    FED: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `step_latent_attention`. The arguments `q` to `before_lse` are the op's.

    Grid: heads, programs that loop over blocks of BLOCK_M tokens of a sequence, at least cdiv(tokens, BLOCK_M) of them.
    Program i also writes zeros for the padding among the i-th BLOCK_M tokens of the step. ROTATED is the number of
    rotated elements of a head. Q_ROTATED and BEFORE are the strides of q_rotated and before. ROTATED_TOKEN is the
    stride between tokens of k_rotated.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    BLOCK: tl.constexpr = FORM.block
    TAIL: tl.constexpr = FORM.tail
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    HEADS: tl.constexpr = FORM.kv_heads
    d = tl.arange(0, BLOCK)
    r = tl.arange(0, TAIL)
    e = tl.arange(0, BLOCK_VALUE)
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
        fed = places < count
        row = start + places
        at = row * FED.q.token + head * FED.q.head
        query = tl.load(q + at[:, None] + d[None, :], mask=fed[:, None] & (d < FORM.dim)[None, :], other=0.0)
        at = row * Q_ROTATED.token + head * Q_ROTATED.head
        held = fed[:, None] & (r < ROTATED)[None, :]
        query_rotated = tl.load(q_rotated + at[:, None] + r[None, :], mask=held, other=0.0)
        lse = tl.load(before_lse + row * HEADS + head, mask=fed, other=float("-inf"))
        known = lse > float("-inf")
        peak = tl.where(known, lse * LOG2_E, LOWEST)
        weight_sum = tl.where(known, 1.0, 0.0)
        at = row * BEFORE.token + head * BEFORE.head
        held = (fed & known)[:, None] & (e < FORM.value_dim)[None, :]
        total = tl.load(before + at[:, None] + e[None, :], mask=held, other=0.0).to(tl.float32)
        keys = k + start * FED.k.token + head * FED.k.head
        rotated = k_rotated + start * ROTATED_TOKEN
        values = v + start * FED.v.token + head * FED.v.head
        # First the keys that all rows see, then those that some rows see.
        middle = block * BLOCK_M // BLOCK_N * BLOCK_N
        end = tl.minimum((block + 1) * BLOCK_M, count)
        total, weight_sum, peak = _joined(
            total, weight_sum, peak, query, query_rotated, places, keys, rotated, values, 0, middle,
            ROTATED, ROTATED_TOKEN, BLOCK_N, False, FED, FORM, SCORES,
        )  # fmt: skip
        total, weight_sum, peak = _joined(
            total, weight_sum, peak, query, query_rotated, places, keys, rotated, values, middle, end,
            ROTATED, ROTATED_TOKEN, BLOCK_N, True, FED, FORM, SCORES,
        )  # fmt: skip
        store_rows(out, None, 0, row * HEADS + head, fed, total / weight_sum[:, None], weight_sum, peak, FORM)
        item += tl.num_programs(1)
        sequence = -1
        if item < blocks:
            sequence, block, blocks = block_of_item(item, q_lens, sequences, BLOCK_M, 1, SCAN)
