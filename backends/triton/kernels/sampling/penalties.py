"""Kernels that count the tokens of sequences, and that apply penalties, bans and edits to logits."""

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
def has_penalties(count_rows, banned, edit_rows, row, MOST_BANNED: tl.constexpr, BLOCK_BANNED: tl.constexpr):
    """Return whether row number `row` of the logits has penalties (`count_rows`[row] >= 0), banned tokens, or edits
    (`edit_rows`[row] >= 0)."""
    entry = tl.arange(0, BLOCK_BANNED)
    ban = tl.load(banned + row * MOST_BANNED + entry, mask=entry < MOST_BANNED, other=-1)
    return (tl.load(count_rows + row) >= 0) | (tl.max(ban) >= 0) | (tl.load(edit_rows + row) >= 0)


@triton.jit
def after_penalties(
    value,
    token,
    used,
    row,
    count_row,
    token_counts,
    repetition,
    frequency,
    presence,
    COUNTS_ROW: tl.constexpr,
    GENERATED: tl.constexpr,
):
    """Return the logits `value` of the token ids `token` after the penalties of the row of logits number `row`.

    `count_row` is the row of `token_counts` with the sequence's counts; -1: no penalties. Entries outside the mask
    `used` are arbitrary.
    """
    if count_row >= 0:
        held = tl.load(token_counts + count_row.to(tl.int64) * COUNTS_ROW + token, mask=used, other=0)
        times = (held // GENERATED).to(tl.float32)
        factor = tl.load(repetition + row)
        repeated = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        seen = tl.where(times > 0, tl.load(presence + row), 0.0)
        value = tl.where(held != 0, repeated - times * tl.load(frequency + row) - seen, value)
    return value


@triton.jit
def forbid(
    row_penalized,
    edit,
    last,
    first,
    VOCAB: tl.constexpr,
    ALLOWED: tl.constexpr,
    BIASES: tl.constexpr,
    PAIRS: tl.constexpr,
    ANY_TOKEN: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set to -inf those of SHARE logits in `row_penalized`, from token id `first` on, that a row's edits forbid.

    These are the tokens without a bit in the ALLOWED words at `edit`, and the banned ones of PAIRS pairs (after,
    banned) whose `after` is ANY_TOKEN or the token `last`.
    """
    for start in range(first, first + SHARE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        word = tl.load(edit + column // 32, mask=column < VOCAB, other=-1)
        tl.store(row_penalized + column, float("-inf"), mask=(column < VOCAB) & (((word >> (column % 32)) & 1) == 0))
    pair = tl.arange(0, PAIRS)
    after = tl.load(edit + ALLOWED + 2 * BIASES + pair)
    ban = tl.load(edit + ALLOWED + 2 * BIASES + PAIRS + pair)
    here = ((after == ANY_TOKEN) | (after == last)) & (ban >= first) & (ban < first + SHARE) & (ban < VOCAB)
    tl.store(row_penalized + ban, float("-inf"), mask=here)


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
    edits,
    edit_rows,
    last_token,
    VOCAB: tl.constexpr,
    COUNTS_ROW: tl.constexpr,
    GENERATED: tl.constexpr,
    MOST_BANNED: tl.constexpr,
    BLOCK_BANNED: tl.constexpr,
    EDITS_ROW: tl.constexpr,
    ALLOWED: tl.constexpr,
    BIASES: tl.constexpr,
    PAIRS: tl.constexpr,
    ANY_TOKEN: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply edits, penalties and bans to SHARE logits of a row, from token id `first` on, and write the result.

    `row` is the number of the row. `row_logits` points to its logits, and `row_penalized` to the results. Afterwards,
    all threads of the block may read the results. The reference is `ingot.ir.ops.penalties.penalized`.
    """
    count_row, edit_row = tl.load(count_rows + row), tl.load(edit_rows + row)
    for start in range(first, first + SHARE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        used = column < VOCAB
        value = tl.load(row_logits + column, mask=used, other=0.0).to(tl.float32)
        value = after_penalties(
            value,
            column,
            used,
            row,
            count_row,
            token_counts,
            repetition,
            frequency,
            presence,
            COUNTS_ROW,
            GENERATED,
        )
        tl.store(row_penalized + column, value, mask=used)
    edit = edits + edit_row.to(tl.int64) * EDITS_ROW
    tl.debug_barrier()  # other threads of the block stored the logits that are written again below
    if edit_row >= 0:
        for start in range(0, BIASES, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            token = tl.load(edit + ALLOWED + entry, mask=entry < BIASES, other=-1)
            used = (token >= first) & (token < first + SHARE) & (token < VOCAB)
            bias = tl.load(edit + ALLOWED + BIASES + entry, mask=used, other=0).to(tl.float32, bitcast=True)
            value = tl.load(row_logits + token, mask=used, other=0.0).to(tl.float32) + bias
            value = after_penalties(
                value,
                token,
                used,
                row,
                count_row,
                token_counts,
                repetition,
                frequency,
                presence,
                COUNTS_ROW,
                GENERATED,
            )
            tl.store(row_penalized + token, value, mask=used)
        tl.debug_barrier()
        last = tl.load(last_token + edit_row)
        forbid(row_penalized, edit, last, first, VOCAB, ALLOWED, BIASES, PAIRS, ANY_TOKEN, SHARE, BLOCK)
    entry = tl.arange(0, BLOCK_BANNED)
    ban = tl.load(banned + row * MOST_BANNED + entry, mask=entry < MOST_BANNED, other=-1)
    here = (ban >= first) & (ban < first + SHARE) & (ban < VOCAB)
    tl.store(row_penalized + ban, tl.full((BLOCK_BANNED,), float("-inf"), tl.float32), mask=here)
    tl.debug_barrier()
