"""Functions for split-K in decode attention: count a context's splits, find a program's split, merge the results."""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.attention.constants import group_rows
from ingot.backends.triton.kernels.attention.parts import end_seen, first_seen, forgets, size_of
from ingot.backends.triton.kernels.attention.softmax import LOWEST, log_sum_exp
from ingot.ir.features import sharing as columns

OWN = tl.constexpr(columns.OWN)
COLUMNS = tl.constexpr(columns.COLUMNS)


@triton.jit
def owner_of(token, q_starts, q_lens, sequences, SCAN: tl.constexpr):
    """Return the index of the sequence that a token of the step belongs to, or -1 for padding.

    `q_starts` and `q_lens` are the first token and the number of tokens of each sequence. A loop iteration tests SCAN
    sequences.
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
    """Return the context lengths of the sequences with indices `b`, without shared prefixes.

    The kernel `shared_attention` computes the prefixes. `sharing` is the table of shared prefixes, or None.
    """
    lengths = tl.load(kv_lens + b, mask=b < sequences, other=0)
    if sharing is not None:
        lengths -= tl.load(sharing + b * COLUMNS + OWN, mask=b < sequences, other=0)
    return lengths


@triton.jit
def positions_read(length, count, SCORES: tl.constexpr, SPLITS: tl.constexpr):
    """Return the most positions that one token of a sequence reads.

    The sequence has `length` positions, and `count` tokens in the step. Window and chunked masks hide older positions.
    With SPLITS.fed_apart, the tokens of the step do not count.
    """
    MASK: tl.constexpr = SCORES.mask
    read = length - count if SPLITS.fed_apart else length
    if forgets(MASK):
        read = tl.minimum(read, size_of(MASK))
    return read


@triton.jit
def splits_of(read, share, SPLITS: tl.constexpr):
    """Return the number of splits of a context of `read` positions: read / share, between `base` and `most`.

    `share` is the intended length of a split in positions. The quotient is rounded to nearest. A context then has fewer
    than read / share splits beyond `base`, which bounds the grid.
    """
    return tl.minimum(tl.maximum((read + share // 2) // share, SPLITS.base), SPLITS.most)


@triton.jit
def taken(counts, SPLITS: tl.constexpr):
    """Return how many tokens of each sequence the kernel computes. `counts` are the sequences' tokens in the step.

    It computes all of them. With SPLITS.single, it computes only sequences with one token, and the result for others is
    0.
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
    """Return the intended length of a split: (positions that all tokens of the step read) / SPLITS.shares.

    It is at least one chunk. `counts` (tokens to compute, from `taken`) and `lengths` (from `contexts`) are of the
    first SPLITS.scan sequences. This function loads them for all other sequences. `sharing` is the table of shared
    prefixes, or None.
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
    """Find the additional split number `item` of the step. Only long contexts have more than `base` splits.

    Return (sequence, index of the split among the sequence's additional splits, additional splits per (token, head) of
    the sequence). The sequence is -1 if there is no such split. `share` is the intended length of a split in positions.
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
def seen_range(own_place, cached, length, sharing, sequence, SCORES: tl.constexpr, SPLITS: tl.constexpr):
    """Return (first, end): the splits of a token's context read the cached positions `first` to `end` - 1.

    `own_place` is the token's position. The sequence has `cached` positions before the step, and `length` after it.
    `sharing` is the table of shared prefixes, or None. The range excludes a shared prefix.
    """
    MASK: tl.constexpr = SCORES.mask
    end = cached if SPLITS.fed_apart else end_seen(own_place, length, MASK)
    low = 0
    if forgets(MASK):
        low = first_seen(own_place, MASK)
    elif sharing is not None:
        low = tl.load(sharing + sequence * COLUMNS + OWN)
    return low, end


@triton.jit
def used_splits(splits, low, end, SPLITS: tl.constexpr):
    """Return (number of splits with work, index of the split that also attends to the tokens of the step).

    `splits` programs share a context. The part that a program reads is a split. Together they read the positions `low`
    to `end` - 1, chunk by chunk. If some splits get no chunk, the first of them attends to the tokens of the step.
    Otherwise, or with at most one chunk, split 0 does.
    """
    chunks = tl.cdiv(tl.maximum(end - low, 0), SPLITS.chunk)
    feeding = 0
    if SPLITS.fed_apart:
        feeding = tl.where((chunks > 1) & (chunks < splits), chunks, 0)
    return tl.minimum(splits, tl.maximum(chunks, feeding + 1)), feeding


@triton.jit
def store_split(partial, sizes, here, inside, mean, weight_sum, peak, FORM: tl.constexpr):
    """Write the result of a split (one part of a context) to scratch memory at index `here`.

    `partial` receives the attention `mean` [G, FORM.block_value] of the split. `inside` masks its elements. `sizes`
    receives the base-2 logarithm of the split's sum of weights.
    """
    e = tl.arange(0, FORM.block_value)
    g = tl.arange(0, group_rows(FORM))
    into = partial + here * (FORM.group * FORM.value_dim) + g[:, None] * FORM.value_dim + e[None, :]
    tl.store(into, mean, mask=inside)
    tl.store(sizes + here * FORM.group + g, peak + tl.log2(weight_sum), mask=g < FORM.group)


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

    Return (base-2 logarithms of the sums of weights, attention), each [SPLITS.at_once, heads * FORM.block_value]. `g`
    are the q heads. `column` are the offsets in a result row, and `inside` masks them.
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

    `size` holds the base-2 logarithms of the splits' sums of weights, and `part` their attention. The last axis of both
    is the columns of all heads.
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
    """Merge the splits of a (token, k/v head) for SPLITS.heads_at_once q heads, and write the result.

    `first_head` is the first of these q heads. The other arguments are those of `merge_splits`.
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
    """Merge the results of `splits` splits into the attention of a (token, k/v head). Write it to row `row` of `out`.

    A split is the part of the context that one program has read. `partial` holds the attention of the splits, and
    `sizes` their sums of weights, at index `pair`. `lse`, unless None, receives the log-sum-exp. The loads bypass the
    L1 cache (".cg"), because other multiprocessors wrote the splits during this launch.
    """
    if FORM.group <= SPLITS.heads_at_once:
        _merge_heads(out, lse, partial, sizes, row, pair, splits, 0, FORM, SPLITS)
    else:
        for first_head in range(0, FORM.group, SPLITS.heads_at_once):
            _merge_heads(out, lse, partial, sizes, row, pair, splits, first_head, FORM, SPLITS)
