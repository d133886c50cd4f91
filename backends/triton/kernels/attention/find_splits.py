"""Find the splits of all contexts of a step, one record each, for an attention kernel that cannot search for them.

`decode_attention` finds its split itself. A kernel in Gluon, Triton's lower language, cannot call the same functions:
there each tensor has a layout. So this kernel calls them before, and writes what they found.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.constants import group_rows
from ingot.backends.triton.kernels.attention.parts import store_unowned
from ingot.backends.triton.kernels.attention.splits import (
    contexts,
    further_item,
    owner_of,
    positions_read,
    seen_range,
    share_of,
    splits_of,
    taken,
    used_splits,
)

# The columns of a record. A split reads chunks of SPLITS.chunk positions: the first at FIRST, and one of every
# SPLITS_OF chunks after it, up to the position END - 1.
TOKEN = tl.constexpr(0)  # the row of q, or -1 if there is no such split
SEQUENCE = tl.constexpr(1)
HEAD = tl.constexpr(2)  # the k/v head
SPLIT = tl.constexpr(3)  # the index of the split in its context
SPLITS_OF = tl.constexpr(4)  # the number of splits of the context
FIRST = tl.constexpr(5)
END = tl.constexpr(6)
RECORD = tl.constexpr(8)  # numbers of a record: 32 bytes, a sector of the L2 cache


@triton.jit(do_not_specialize=["tokens", "sequences"])
def find_splits(
    records,
    used,
    out,
    lse,
    q_starts,
    q_lens,
    kv_lens,
    tokens,
    sequences,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write the record of each split of the step to `records` i32[programs, RECORD].

    The grid and the other arguments are those of `decode_attention`. `used` i32[rows, kv_heads] receives the number of
    splits of each context. Rows are tokens, or with SPLITS.single sequences. Tokens of padding, and those that see no
    key, have none: this kernel writes zeros to their rows of `out`, and -inf to `lse`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.program_id(0)
    rows = sequences if SPLITS.single else tokens
    pairs = rows * FORM.kv_heads
    first_items = pairs * SPLITS.base
    head = item % FORM.kv_heads
    token = item // FORM.kv_heads % rows
    split = item // pairs
    here = records + item * RECORD
    place = 0
    more = 1
    share = 1
    sequence = -1
    if SPLITS.shares > 0:
        b = tl.arange(0, SPLITS.scan)
        counts = taken(tl.load(q_lens + b, mask=b < sequences, other=0), SPLITS)
        lengths = contexts(kv_lens, None, b, sequences)
        share = share_of(counts, lengths, q_lens, kv_lens, None, sequences, SCORES, SPLITS)
    if item < first_items:
        sequence = token if SPLITS.single else owner_of(token, q_starts, q_lens, sequences, SPLITS.scan)
    elif SPLITS.shares > 0:
        sequence, place, more = further_item(
            item - first_items, share, q_lens, kv_lens, None, sequences, FORM, SCORES, SPLITS
        )
    first = 0
    count = 0
    length = 0
    if sequence >= 0:
        first = tl.load(q_starts + sequence)
        count = tl.load(q_lens + sequence)
        length = tl.load(kv_lens + sequence)
    if SPLITS.single:
        token = first
    if item >= first_items:
        split = SPLITS.base + place % more
        head = place // more % FORM.kv_heads
        token = first + place // more // FORM.kv_heads
    cached = length - count
    low, end = seen_range(cached + token - first, cached, length, None, sequence, SCORES, SPLITS)
    row = token * FORM.kv_heads + head
    # Where the rows of a context are counted: by sequence, if a sequence has one row.
    pair = sequence * FORM.kv_heads + head if SPLITS.single else row
    computed = (sequence >= 0) & (count == 1 if SPLITS.single else count > 0)
    seen = computed & (low < end)
    if not seen:
        # A token of padding, a sequence that another launch computes, or a token that sees no key.
        tl.store(here + TOKEN, -1)
        first_split = (item < first_items) & (split == 0)
        tl.store(used + pair, 0, mask=first_split)
        g = tl.arange(0, group_rows(FORM))
        own = (g < FORM.group) & first_split
        if SPLITS.single:
            own &= computed
        store_unowned(out, lse, row.to(tl.int64) * FORM.group, g, own, FORM)
        return
    splits = SPLITS.base
    if SPLITS.shares > 0:
        splits = splits_of(positions_read(length, count, SCORES, SPLITS), share, SPLITS)
    splits, _ = used_splits(splits, low, end, SPLITS)
    tl.store(used + pair, splits, mask=split == 0)
    tl.store(here + TOKEN, tl.where(split < splits, token, -1))
    tl.store(here + SEQUENCE, sequence)
    tl.store(here + HEAD, head)
    tl.store(here + SPLIT, split)
    tl.store(here + SPLITS_OF, splits)
    tl.store(here + FIRST, low + split * SPLITS.chunk)
    tl.store(here + END, end)
