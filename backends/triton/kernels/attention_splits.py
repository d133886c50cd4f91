"""Splits of contexts: which a program has, how many there are, and how their results are put together."""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.attention import LOWEST, forgets, log_sum_exp, size_of
from ingot.ir.features import sharing as columns

OWN = tl.constexpr(columns.OWN)
COLUMNS = tl.constexpr(columns.COLUMNS)


@triton.jit
def owner_of(token, q_starts, q_lens, sequences, SCAN: tl.constexpr):
    """The sequence that owns a token, or -1. SCAN sequences are looked at together."""
    sequence = -1
    for first in range(0, sequences, SCAN):
        b = first + tl.arange(0, SCAN)
        start = tl.load(q_starts + b, mask=b < sequences, other=0)
        count = tl.load(q_lens + b, mask=b < sequences, other=0)
        sequence = tl.maximum(sequence, tl.max(tl.where((start <= token) & (token < start + count), b, -1)))
    return sequence


@triton.jit
def contexts(kv_lens, sharing, b, sequences):
    """Positions of the sequences `b` that are read for each of them alone: all but a prefix that its group reads."""
    lengths = tl.load(kv_lens + b, mask=b < sequences, other=0)
    if sharing is not None:
        lengths -= tl.load(sharing + b * COLUMNS + OWN, mask=b < sequences, other=0)
    return lengths


@triton.jit
def positions_read(length, count, SCORES: tl.constexpr, SPLITS: tl.constexpr):
    """Positions that splits of the first of a sequence's `count` tokens read of `length`, at most."""
    MASK: tl.constexpr = SCORES.mask
    read = length - count if SPLITS.fed_apart else length
    if forgets(MASK):
        read = tl.minimum(read, size_of(MASK))
    return read


@triton.jit
def splits_of(read, share, SPLITS: tl.constexpr):
    """`base` splits, or more for a longer context: beyond `base` no more than read / share, by which grids are
    bounded."""
    return tl.minimum(tl.maximum((read + share // 2) // share, SPLITS.base), SPLITS.most)


@triton.jit
def taken(counts, SPLITS: tl.constexpr):
    """How many of the tokens that sequences feed are the kernel's: all, or those of sequences that feed one."""
    if SPLITS.single:
        counts = tl.where(counts == 1, counts, 0)
    return counts


@triton.jit
def share_of(
    counts,
    lengths,
    q_lens,
    kv_lens,
    sharing,
    sequences,
    SCORES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Positions of a split: what all tokens together read, in `shares` parts. `counts` (those taken) and `lengths`
    [SPLITS.scan] are those of the first sequences."""
    work = tl.sum(counts * positions_read(lengths, counts, SCORES, SPLITS))
    for first in range(SPLITS.scan, sequences, SPLITS.scan):
        b = first + tl.arange(0, SPLITS.scan)
        count = taken(tl.load(q_lens + b, mask=b < sequences, other=0), SPLITS)
        length = contexts(kv_lens, sharing, b, sequences)
        work += tl.sum(count * positions_read(length, count, SCORES, SPLITS))
    return tl.maximum(tl.cdiv(work, SPLITS.shares), SPLITS.chunk)


@triton.jit
def further_item(
    item,
    share,
    q_lens,
    kv_lens,
    sharing,
    sequences,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Of the items after the first `base` of each (token, head): (sequence or -1, the item's place among those of its
    sequence, how many of them each (token, head) has there)."""
    sequence = -1
    place = 0
    more = 1
    before = 0
    for first in range(0, sequences, SPLITS.scan):
        b = first + tl.arange(0, SPLITS.scan)
        count = taken(tl.load(q_lens + b, mask=b < sequences, other=0), SPLITS)
        length = contexts(kv_lens, sharing, b, sequences)
        splits = splits_of(positions_read(length, count, SCORES, SPLITS), share, SPLITS)
        items = count * FORM.kv_heads * (splits - SPLITS.base)
        end = before + tl.cumsum(items, 0)
        own = (item >= end - items) & (item < end)
        sequence = tl.maximum(sequence, tl.max(tl.where(own, b, -1)))
        place += tl.sum(tl.where(own, item - (end - items), 0))
        more += tl.sum(tl.where(own, splits - SPLITS.base - 1, 0))
        before += tl.sum(items)
    return sequence, place, more


@triton.jit
def _left_by_splits(
    partial,
    sizes,
    pair,
    first,
    splits,
    g,
    column,
    inside,
    FORM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """(sizes, attention) [SPLITS.at_once, heads * FORM.block_value] that the splits from `first` on left at `pair`."""
    GROUP: tl.constexpr = FORM.group
    AT_ONCE: tl.constexpr = SPLITS.at_once
    HEADS: tl.constexpr = SPLITS.heads_at_once
    BLOCK: tl.constexpr = FORM.block_value
    s = first + tl.arange(0, AT_ONCE)
    held = (s < splits)[:, None]
    here = (pair * SPLITS.most + s)[:, None]
    size = tl.load(
        sizes + here * GROUP + g[None, :], mask=held & (g < GROUP)[None, :], other=LOWEST, cache_modifier=".cg"
    )
    part = tl.load(
        partial + here * (GROUP * FORM.value_dim) + column[None, :],
        mask=held & inside[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    size = tl.broadcast_to(size[:, :, None], (AT_ONCE, HEADS, BLOCK))
    return tl.reshape(size, (AT_ONCE, HEADS * BLOCK)), part


@triton.jit
def _joined(size, part, total, weight_sum, peak):
    """The state of columns after more splits of the sizes `size`, which have the attention `part`."""
    higher = tl.maximum(peak, tl.max(size, 0))
    share = tl.exp2(size - higher[None, :])
    shrunk = tl.exp2(peak - higher)
    return total * shrunk + tl.sum(part * share, 0), weight_sum * shrunk + tl.sum(share, 0), higher


@triton.jit
def _put_heads_together(
    out,
    lse,
    partial,
    sizes,
    row,
    pair,
    splits,
    first_head,
    FORM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """`put_together` for SPLITS.heads_at_once heads of q from `first_head` on."""
    GROUP: tl.constexpr = FORM.group
    DIM: tl.constexpr = FORM.value_dim
    BLOCK: tl.constexpr = FORM.block_value
    HEADS: tl.constexpr = SPLITS.heads_at_once
    MOST: tl.constexpr = SPLITS.most
    AT_ONCE: tl.constexpr = SPLITS.at_once
    WIDTH: tl.constexpr = HEADS * BLOCK
    # All heads in one row, so that a thread has columns of its own, and nothing is added up between threads.
    g = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    inside = (first_head + column // BLOCK < GROUP) & (column % BLOCK < DIM)
    column = (first_head + column // BLOCK) * DIM + column % BLOCK
    if GROUP <= HEADS:
        # No loop: what goes round one is moved between threads. Rounds that no split is left for load nothing.
        for first in tl.static_range(0, MOST, AT_ONCE):
            size, part = _left_by_splits(partial, sizes, pair, first, splits, g, column, inside, FORM, SPLITS)
            if first == 0:
                peak = tl.max(size, 0)
                share = tl.exp2(size - peak[None, :])
                weight_sum = tl.sum(share, 0)
                total = tl.sum(part * share, 0)
            else:
                total, weight_sum, peak = _joined(size, part, total, weight_sum, peak)
    else:
        # So wide that most splits are far more rounds than a usual context has.
        peak = tl.full((WIDTH,), LOWEST, tl.float32)
        weight_sum = tl.zeros((WIDTH,), tl.float32)
        total = tl.zeros((WIDTH,), tl.float32)
        for first in range(0, splits, AT_ONCE):
            size, part = _left_by_splits(partial, sizes, pair, first, splits, g, column, inside, FORM, SPLITS)
            total, weight_sum, peak = _joined(size, part, total, weight_sum, peak)
    result = (total / weight_sum).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * (GROUP * DIM) + column, result, mask=inside)
    if lse is not None:
        whose = row.to(tl.int64) * GROUP + column // DIM
        tl.store(lse + whose, log_sum_exp(weight_sum, peak), mask=inside & (column % DIM == 0))


@triton.jit
def put_together(
    out,
    lse,
    partial,
    sizes,
    row,
    pair,
    splits,
    FORM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The attention of a (token, head), which is row `row` of `out`, from the splits that lie at `pair`.

    Other multiprocessors wrote them during this launch: they are read past the first cache.
    """
    if FORM.group <= SPLITS.heads_at_once:
        _put_heads_together(out, lse, partial, sizes, row, pair, splits, 0, FORM, SPLITS)
    else:
        for first_head in range(0, FORM.group, SPLITS.heads_at_once):
            _put_heads_together(out, lse, partial, sizes, row, pair, splits, first_head, FORM, SPLITS)
