"""Kernels that count the tokens of sequences, and that apply penalties and bans of tokens to logits."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def count_tokens(
    token_counts,
    ids,
    positions,
    token_seqs,
    rows,
    prompt_ends,
    num_tokens,
    VOCAB: tl.constexpr,
    COUNTS_ROW: tl.constexpr,
    SHARE: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    GENERATED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `count_tokens`: add the step's tokens of sequences with penalties to `token_counts`, in place.

    A program reads all tokens of the step, and updates the counts of SHARE vocabulary ids of one sequence. No other
    program writes these counts. The program therefore clears the counts of a new sequence itself, without a second
    launch.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    seq = tl.program_id(0)
    first = tl.program_id(1) * SHARE
    row, end = tl.load(rows + seq), tl.load(prompt_ends + seq)
    if DEPENDENT:
        gdc_wait()
    if (end >= 0) & (row >= 0):
        counts = token_counts + row.to(tl.int64) * COUNTS_ROW
        begins = 0
        for start in range(0, num_tokens, BLOCK_TOKENS):
            token = start + tl.arange(0, BLOCK_TOKENS)
            mine = tl.load(token_seqs + token, mask=token < num_tokens, other=-1) == seq
            position = tl.load(positions + token, mask=mine, other=1)
            begins = tl.maximum(begins, tl.max(tl.where(mine & (position == 0), 1, 0)))
        if begins > 0:
            for start in range(0, SHARE, BLOCK):
                column = first + start + tl.arange(0, BLOCK)
                tl.store(counts + column, tl.zeros((BLOCK,), tl.int32), mask=column < VOCAB)
            tl.debug_barrier()  # other threads of the block count where this one clears
        for start in range(0, num_tokens, BLOCK_TOKENS):
            token = start + tl.arange(0, BLOCK_TOKENS)
            mine = tl.load(token_seqs + token, mask=token < num_tokens, other=-1) == seq
            identity = tl.load(ids + token, mask=mine, other=-1)
            mine = mine & (identity >= first) & (identity < first + SHARE) & (identity < VOCAB)
            generated = tl.load(positions + token, mask=mine, other=0) >= end
            tl.atomic_add(counts + identity, GENERATED, mask=mine & generated, sem="relaxed")
            tl.atomic_or(counts + identity, IN_PROMPT, mask=mine & (generated == 0), sem="relaxed")


@triton.jit
def has_penalties(count_rows, banned, row, MOST_BANNED: tl.constexpr, BLOCK_BANNED: tl.constexpr):
    """Return whether row number `row` of the logits has penalties (`count_rows`[row] >= 0) or banned tokens."""
    entry = tl.arange(0, BLOCK_BANNED)
    ban = tl.load(banned + row * MOST_BANNED + entry, mask=entry < MOST_BANNED, other=-1)
    return (tl.load(count_rows + row) >= 0) | (tl.max(ban) >= 0)


@triton.jit
def penalize(
    row_logits,
    row_penalized,
    first,
    row,
    token_counts,
    count_rows,
    repetition,
    frequency,
    presence,
    banned,
    VOCAB: tl.constexpr,
    COUNTS_ROW: tl.constexpr,
    GENERATED: tl.constexpr,
    MOST_BANNED: tl.constexpr,
    BLOCK_BANNED: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply penalties and bans to SHARE logits of a row, from token id `first` on, and write the result.

    `row` is the number of the row. `row_logits` points to its logits, and `row_penalized` to the results. Afterwards,
    all threads of the block may read the results. The reference is `ingot.ir.ops.penalties.penalized`.
    """
    count_row = tl.load(count_rows + row)
    for start in range(first, first + SHARE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(row_logits + column, mask=column < VOCAB, other=0.0).to(tl.float32)
        if count_row >= 0:
            held = tl.load(token_counts + count_row.to(tl.int64) * COUNTS_ROW + column, mask=column < VOCAB, other=0)
            times = (held // GENERATED).to(tl.float32)
            factor = tl.load(repetition + row)
            repeated = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
            seen = tl.where(times > 0, tl.load(presence + row), 0.0)
            value = tl.where(held != 0, repeated - times * tl.load(frequency + row) - seen, value)
        tl.store(row_penalized + column, value, mask=column < VOCAB)
    entry = tl.arange(0, BLOCK_BANNED)
    ban = tl.load(banned + row * MOST_BANNED + entry, mask=entry < MOST_BANNED, other=-1)
    here = (ban >= first) & (ban < first + SHARE) & (ban < VOCAB)
    tl.debug_barrier()  # other threads of the block stored these tokens' logits
    tl.store(row_penalized + ban, tl.full((BLOCK_BANNED,), float("-inf"), tl.float32), mask=here)
    tl.debug_barrier()
