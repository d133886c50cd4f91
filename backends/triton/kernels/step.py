"""Kernels of the first and last ops of a step, and of row lookups.

They compute a step's tokens, positions and cache slots, and the last token and position of each sequence for the next.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _slot(page_table, seq, place, real, max_pages, PAGE_SIZE: tl.constexpr):
    """Return the cache slots of tokens: page number * PAGE_SIZE + place in the page. Padding has the slot -1.

    `place` are positions of the tokens, and `seq` the indices of their sequences. The mask `real` is false for padding.
    """
    # A place below 0 has no page; such a token is not a real one.
    page = tl.load(page_table + seq.to(tl.int64) * max_pages + place // PAGE_SIZE, mask=real & (place >= 0), other=0)
    return tl.where(real, page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE, -1)


@triton.jit
def feed(
    tokens,
    token_seqs,
    q_starts,
    q_lens,
    rows,
    starts,
    page_table,
    last_token,
    position,
    ids,
    positions,
    slots,
    kv_lens,
    num_tokens,
    num_seqs,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `feed`, which begins a step.

    The results are `ids`, `positions` and `slots` by token, and `kv_lens` by sequence. The other arguments are the
    op's. A program takes BLOCK tokens and BLOCK sequences.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token_mask = index < num_tokens
    seq = tl.load(token_seqs + index, mask=token_mask, other=-1)
    real = seq >= 0
    row = tl.load(rows + seq, mask=real, other=0)
    row = tl.maximum(row, 0)
    begin = tl.load(starts + seq, mask=real, other=0)
    begin = tl.where(begin >= 0, begin, tl.load(position + row, mask=real & (begin < 0), other=0))
    place = tl.where(real, begin + index - tl.load(q_starts + seq, mask=real, other=0), 0)
    given = tl.load(tokens + index, mask=real, other=0)
    fed = tl.where(given >= 0, given, tl.load(last_token + row, mask=real & (given < 0), other=0))
    slot = tl.full((BLOCK,), -1, tl.int64)
    if page_table is not None:
        slot = _slot(page_table, seq, place, real, max_pages, PAGE_SIZE)
    tl.store(ids + index, tl.maximum(fed, 0), mask=token_mask)
    tl.store(positions + index, place, mask=token_mask)
    tl.store(slots + index, slot, mask=token_mask)

    seq_mask = index < num_seqs
    own_row = tl.load(rows + index, mask=seq_mask, other=-1)
    running = own_row >= 0
    own_begin = tl.load(starts + index, mask=running, other=0)
    stands = tl.load(position + own_row, mask=running & (own_begin < 0), other=0)
    own_begin = tl.where(own_begin >= 0, own_begin, stands)
    length = tl.where(running, own_begin + tl.load(q_lens + index, mask=running, other=0), 0)
    tl.store(kv_lens + index, length, mask=seq_mask)


@triton.jit
def page_slots(
    positions,
    token_seqs,
    page_table,
    slots,
    num_tokens,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `page_slots`: the cache slot of each token, from its position and the page table.

    Padding tokens have the slot -1. A program takes BLOCK tokens.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_tokens
    seq = tl.load(token_seqs + index, mask=mask, other=-1)
    real = seq >= 0
    place = tl.load(positions + index, mask=real, other=0)
    tl.store(slots + index, _slot(page_table, seq, place, real, max_pages, PAGE_SIZE), mask=mask)


@triton.jit
def advance(
    last_token,
    position,
    rows,
    kv_lens,
    sampled,
    sample_index,
    rejected,
    num_seqs,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `advance`, which ends a step: store the last token and the length of each sequence, in place.

    The arguments are the op's. `last_token` and `position` have a row per running sequence. `rows` has the row of each
    sequence of the step. A program takes BLOCK sequences.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seq < num_seqs
    row = tl.load(rows + seq, mask=mask, other=-1)
    index = tl.load(sample_index + seq, mask=mask, other=-1)
    real = row >= 0
    if DEPENDENT:
        gdc_wait()
    length = tl.load(kv_lens + seq, mask=mask, other=0)
    if rejected is not None:
        back = tl.load(rejected + seq, mask=mask, other=0)
        length -= back
        index = tl.where(index >= 0, index - back, -1)
    commits = real & (index >= 0)
    token = tl.load(sampled + index, mask=commits, other=0)
    tl.store(position + row, length, mask=real)
    tl.store(last_token + row, token, mask=commits)


@triton.jit
def gather(
    table,
    indices,
    result,
    num_indices,
    table_rows,
    TABLE_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Copy row `indices[i]` of the table, WIDTH elements, to row i of `result`.

    Row i becomes zeros if the table has no such row.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = row < num_indices
    index = tl.load(indices + row, mask=mask, other=-1)
    there = (index >= 0) & (index < table_rows)
    source = table + index.to(tl.int64)[:, None] * TABLE_ROW + column
    value = tl.load(source, mask=there[:, None] & (column < WIDTH), other=0)
    target = result + row.to(tl.int64)[:, None] * WIDTH + column
    tl.store(target, value, mask=mask[:, None] & (column < WIDTH))
