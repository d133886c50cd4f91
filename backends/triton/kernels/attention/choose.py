"""Kernels of an indexer over a paged cache of its keys: the scores of positions, and the choice of the greatest.

    index_scores, programs that share the positions of a token:
        if the token sees more positions than it chooses: write the score of each position, block by block
    choose, a program per token:
        if the token sees no more positions than it chooses: write them all
        else:
            for each of four digits of eight bits, the highest first: count the scores of each digit among those that
                have the digits found before, and find the digit of the least score that is chosen
            write the positions with greater scores, and as many of the first equal ones as are left

Scores are compared by integers with their order. A score is a sum in one order whatever the step, so it has the same
bits in all steps.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.addresses import rows_of
from ingot.backends.triton.kernels.attention.splits import owner_of
from ingot.backends.triton.kernels.order import LEAST, order_of

# Bits of a digit, and the numbers that it can have.
_BITS = tl.constexpr(8)
_DIGITS = tl.constexpr(256)


@triton.jit
def _seen(token, sequence, q_starts, q_lens, kv_lens):
    """Return how many positions a token of a sequence sees: its own and the earlier ones. Without a sequence, 0."""
    seen = 0
    if sequence >= 0:
        before = tl.load(kv_lens + sequence) - tl.load(q_lens + sequence)
        seen = before + token - tl.load(q_starts + sequence) + 1
    return seen


@triton.jit(do_not_specialize=["first", "sequences", "width"])
def index_scores(
    scores,
    q,
    keys,
    weights,
    page_table,
    q_starts,
    q_lens,
    kv_lens,
    first,
    sequences,
    width,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHTS_ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write the scores f32[tokens, width * page] of the positions that tokens see, from the token `first` on.

    The arguments `q` to `kv_lens` are those of the op `paged_choose_positions`. Grid: tokens, programs that share the
    blocks of a token. Rows of tokens that see at most TOP_K positions are not written, nor positions that a token does
    not see. A program takes BLOCK_N positions at a time.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    nth = tl.program_id(0)
    token = first + nth
    sequence = owner_of(token, q_starts, q_lens, sequences, SCAN)
    seen = _seen(token, sequence, q_starts, q_lens, kv_lens)
    if seen <= TOP_K:
        return
    h = tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_WIDTH)
    at = token.to(tl.int64) * FED.q.token + h * FED.q.head
    query = tl.load(q + at[:, None] + d[None, :], mask=(h < HEADS)[:, None] & (d < WIDTH)[None, :], other=0.0)
    weight = tl.load(weights + token.to(tl.int64) * WEIGHTS_ROW + h, mask=h < HEADS, other=0.0)
    pages = page_table + sequence.to(tl.int64) * width
    into = scores + nth.to(tl.int64) * width * CACHE.page
    for start in range(tl.program_id(1) * BLOCK_N, seen, tl.num_programs(1) * BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < seen
        rows = rows_of(keys, pages, place, inside, 0, CACHE)
        held = tl.load(rows[:, None] + d[None, :], mask=inside[:, None] & (d < WIDTH)[None, :], other=0.0)
        dots = tl.dot(held, tl.trans(query), input_precision="ieee")
        # Not `tl.maximum`, which would turn NaN into 0. An infinite key times the zeros of a missing head is NaN.
        score = tl.sum(tl.where((dots < 0.0) | (h >= HEADS)[None, :], 0.0, dots) * weight[None, :], 1)
        tl.store(into + place, score, mask=inside)


@triton.jit
def _next_digit(row, seen, least, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the digit at the bit SHIFT of the least number that is chosen, of those with the higher digits of `least`.

    `wanted` numbers with these digits are chosen. Return (`least` with the digit, how many numbers with it are chosen).
    """
    counts = tl.zeros((_DIGITS,), tl.int32)
    for start in range(0, seen, BLOCK):
        at = start + tl.arange(0, BLOCK)
        counted = at < seen
        # As an unsigned number: the least one is 0.
        number = order_of(tl.load(row + at, mask=counted, other=0.0)) ^ LEAST
        if SHIFT + _BITS < 32:
            counted = counted & ((number >> (SHIFT + _BITS)) == (least >> (SHIFT + _BITS)))
        counts += tl.histogram((number >> SHIFT) & (_DIGITS - 1), _DIGITS, mask=counted)
    digit = tl.arange(0, _DIGITS)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    mine = (above < wanted) & (above + counts >= wanted)
    least |= tl.sum(tl.where(mine, digit, 0), 0) << SHIFT
    return least, wanted - tl.sum(tl.where(mine, above, 0), 0)


@triton.jit
def _least_chosen(row, seen, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Find the least score that is chosen of a row of `seen` scores, more than TOP_K.

    Return (its integer by `order_of`, how many of the scores that equal it are chosen).
    """
    least, wanted = _next_digit(row, seen, 0, TOP_K, 24, BLOCK)
    least, wanted = _next_digit(row, seen, least, wanted, 16, BLOCK)
    least, wanted = _next_digit(row, seen, least, wanted, 8, BLOCK)
    least, wanted = _next_digit(row, seen, least, wanted, 0, BLOCK)
    return least ^ LEAST, wanted


@triton.jit(do_not_specialize=["first", "sequences", "stored"])
def choose(
    chosen,
    scores,
    q_starts,
    q_lens,
    kv_lens,
    first,
    sequences,
    stored,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write the rows of `chosen` i32[tokens, TOP_K] from the token `first` on, as the op `paged_choose_positions` does.

    Grid: tokens. `scores` f32[tokens, stored] are those of `index_scores`. A program reads BLOCK scores at a time.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    nth = tl.program_id(0)
    token = first + nth
    sequence = owner_of(token, q_starts, q_lens, sequences, SCAN)
    seen = _seen(token, sequence, q_starts, q_lens, kv_lens)
    into = chosen + token.to(tl.int64) * TOP_K
    if seen <= TOP_K:
        for start in range(0, TOP_K, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(into + at, tl.where(at < seen, at, -1), mask=at < TOP_K)
    else:
        row = scores + nth.to(tl.int64) * stored
        least, wanted = _least_chosen(row, seen, TOP_K, BLOCK)
        written = 0
        equal = 0
        for start in range(0, seen, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < seen
            order = order_of(tl.load(row + at, mask=inside, other=0.0))
            same = (inside & (order == least)).to(tl.int32)
            rank = equal + tl.cumsum(same, 0) - same
            taken = inside & ((order > least) | ((same > 0) & (rank < wanted)))
            count = taken.to(tl.int32)
            tl.store(into + written + tl.cumsum(count, 0) - count, at, mask=taken)
            written += tl.sum(count, 0)
            equal += tl.sum(same, 0)
