"""Functions for split-K in decode attention: count a context's splits, find a program's split, merge the results."""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.attention import LOWEST, forgets, log_sum_exp, size_of
from ingot.ir.features import sharing as columns

OWN = tl.constexpr(columns.OWN)
COLUMNS = tl.constexpr(columns.COLUMNS)


@triton.jit
def owner_of(token, q_starts, q_lens, sequences, SCAN: tl.constexpr):
    """Return the index of the sequence that a token of the step belongs to; -1 for padding.

    `q_starts` and `q_lens` are each sequence's first token and number of tokens. An iteration tests SCAN sequences.
    """
    sequence = -1
    for first in range(0, sequences, SCAN):
        b = first + tl.arange(0, SCAN)
        start = tl.load(q_starts + b, mask=b < sequences, other=0)
        count = tl.load(q_lens + b, mask=b < sequences, other=0)
        sequence = tl.maximum(sequence, tl.max(tl.where((start <= token) & (token < start + count), b, -1)))
    return sequence


@triton.jit
def contexts(kv_lens, sharing, b, sequences):
    """Return the context lengths of the sequences with indices `b`, minus shared prefixes.

    The kernel `shared_attention` reads those. `sharing` is the table of shared prefixes, or None.
    """
    lengths = tl.load(kv_lens + b, mask=b < sequences, other=0)
    if sharing is not None:
        lengths -= tl.load(sharing + b * COLUMNS + OWN, mask=b < sequences, other=0)
    return lengths


@triton.jit
def positions_read(length, count, SCORES: tl.constexpr, SPLITS: tl.constexpr):
    """Return at most how many of a sequence's `length` positions the splits of one token read together.

    The sequence has `count` tokens in the step. A window or chunked mask hides older positions.
    """
    MASK: tl.constexpr = SCORES.mask
    read = length - count if SPLITS.fed_apart else length
    if forgets(MASK):
        read = tl.minimum(read, size_of(MASK))
    return read


@triton.jit
def splits_of(read, share, SPLITS: tl.constexpr):
    """Return the number of splits of a context of `read` positions: read / share, rounded, between `base` and `most`.

    `share` is the intended length of a split in positions. The rounding keeps the number of splits beyond `base` below
    read / share, which bounds the grid.
    """
    return tl.minimum(tl.maximum((read + share // 2) // share, SPLITS.base), SPLITS.most)


@triton.jit
def taken(counts, SPLITS: tl.constexpr):
    """Return how many tokens of each sequence the kernel computes. `counts` are the sequences' tokens in the step.

    The kernel computes all of them; with SPLITS.single, only those of sequences with one token.
    """
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
    """Return the intended length of a split in positions: those that all tokens of the step read / SPLITS.shares.

    It is at least one chunk. `counts` (results of `taken`) and `lengths` (of `contexts`) are of the first SPLITS.scan
    sequences; for further sequences, this function loads them. `sharing` is the table of shared prefixes, or None.
    """
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
    """Find the further split number `item` of the step. Each (token, k/v head) has `base` splits, then further ones.

    Return (its sequence, its index among the sequence's further splits, the number of further splits of each (token,
    head) of that sequence). The sequence is -1 if there is no such split. `share` is the intended positions of a split.
    """
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
def _load_splits(
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
    """Load the results of SPLITS.at_once splits of the (token, k/v head) `pair`, from split `first` on.

    Return (logarithms of the sums of weights, attention), each [SPLITS.at_once, heads * FORM.block_value]. `g` are the
    q heads, `column` the offsets in a result row; `inside` masks `column`.
    """
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
    """Merge the results of several splits into the online-softmax state. Return the state (total, weight_sum, peak).

    `size` holds the logarithms of the splits' sums of weights, `part` their attention; the last axis is the columns of
    all heads.
    """
    higher = tl.maximum(peak, tl.max(size, 0))
    share = tl.exp2(size - higher[None, :])
    shrunk = tl.exp2(peak - higher)
    return total * shrunk + tl.sum(part * share, 0), weight_sum * shrunk + tl.sum(share, 0), higher


@triton.jit
def _merge_heads(
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
    """Merge the splits of a (token, k/v head) for SPLITS.heads_at_once q heads, from `first_head` on; write the result.

    The other arguments are those of `merge_splits`.
    """
    GROUP: tl.constexpr = FORM.group
    DIM: tl.constexpr = FORM.value_dim
    BLOCK: tl.constexpr = FORM.block_value
    HEADS: tl.constexpr = SPLITS.heads_at_once
    MOST: tl.constexpr = SPLITS.most
    AT_ONCE: tl.constexpr = SPLITS.at_once
    WIDTH: tl.constexpr = HEADS * BLOCK
    # All heads in one row, so that each thread has its own columns and sums need no exchange between threads.
    g = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    inside = (first_head + column // BLOCK < GROUP) & (column % BLOCK < DIM)
    column = (first_head + column // BLOCK) * DIM + column % BLOCK
    if GROUP <= HEADS:
        # Unrolled: a loop's carried state would change layout between threads. Iterations past the splits load nothing.
        for first in tl.static_range(0, MOST, AT_ONCE):
            size, part = _load_splits(partial, sizes, pair, first, splits, g, column, inside, FORM, SPLITS)
            if first == 0:
                peak = tl.max(size, 0)
                share = tl.exp2(size - peak[None, :])
                weight_sum = tl.sum(share, 0)
                total = tl.sum(part * share, 0)
            else:
                total, weight_sum, peak = _joined(size, part, total, weight_sum, peak)
    else:
        # With so many columns, `most` splits are far more iterations than a usual context needs: loop over its splits.
        peak = tl.full((WIDTH,), LOWEST, tl.float32)
        weight_sum = tl.zeros((WIDTH,), tl.float32)
        total = tl.zeros((WIDTH,), tl.float32)
        for first in range(0, splits, AT_ONCE):
            size, part = _load_splits(partial, sizes, pair, first, splits, g, column, inside, FORM, SPLITS)
            total, weight_sum, peak = _joined(size, part, total, weight_sum, peak)
    result = (total / weight_sum).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * (GROUP * DIM) + column, result, mask=inside)
    if lse is not None:
        whose = row.to(tl.int64) * GROUP + column // DIM
        tl.store(lse + whose, log_sum_exp(weight_sum, peak), mask=inside & (column % DIM == 0))


@triton.jit
def merge_splits(
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
    """Merge the results of `splits` splits into the attention of a (token, k/v head), and write it to `out`, row `row`.

    A split is a part of the context that one program has read. `partial` and `sizes` hold the splits' attention and
    sums of weights, at index `pair`. `lse`, unless None, takes the log-sum-exp. Other multiprocessors wrote the splits
    during this launch, so the loads bypass the L1 cache (".cg").
    """
    if FORM.group <= SPLITS.heads_at_once:
        _merge_heads(out, lse, partial, sizes, row, pair, splits, 0, FORM, SPLITS)
    else:
        for first_head in range(0, FORM.group, SPLITS.heads_at_once):
            _merge_heads(out, lse, partial, sizes, row, pair, splits, first_head, FORM, SPLITS)
