"""Decode attention over shared prefixes (cascade attention): a prefix is read once for all sequences that share it.

    for each group of the table `sharing` (ingot.ir.features.sharing), tile of its rows, kv head:
        query = the q of the rows: every q head that reads this kv head, of every member of the group
        for each split of the prefix: attention of all rows over the split

`decode_attention` then continues with each sequence's own positions, and its state begins with these splits. The
programs of the sequences merge the splits, so that no program of this kernel waits for others.

A work item is (group, tile, split). The number of items follows from the table, on the device. The grid has as many
programs as there can be items, and programs without an item end.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.parts import attended
from ingot.backends.triton.kernels.attention.softmax import LOWEST, slopes_of
from ingot.backends.triton.kernels.rope import angles, prepared
from ingot.ir.features import sharing as columns

MEMBER = tl.constexpr(columns.MEMBER)
FIRST = tl.constexpr(columns.FIRST)
COUNT = tl.constexpr(columns.COUNT)
LENGTH = tl.constexpr(columns.LENGTH)
LEADER = tl.constexpr(columns.LEADER)
COLUMNS = tl.constexpr(columns.COLUMNS)


@triton.jit
def _split_positions(length, share, BLOCK_N: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return the number of positions per split of a prefix with `length` positions.

    It is `share` if the prefix then has at most MAX_SPLITS splits. Otherwise it is larger, and a multiple of BLOCK_N.
    """
    return tl.maximum(share, tl.cdiv(tl.cdiv(length, MAX_SPLITS), BLOCK_N) * BLOCK_N)


@triton.jit
def _find_item(
    item,
    sharing,
    rows,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFIXES: tl.constexpr,
):
    """Find the work item number `item`. Return (group, tile, split, number of splits, positions per split).

    A group is sequences that share a prefix. A tile is BLOCK_M query rows of a group, and a split is a part of its
    prefix. The group is -1 if there is no such item. `sharing` is the table of shared prefixes, with `rows` rows.
    """
    group = tl.arange(0, PREFIXES.groups)
    at = sharing + group * COLUMNS
    count = tl.load(at + COUNT, mask=group < rows, other=0)
    length = tl.load(at + LENGTH, mask=group < rows, other=0)
    tiles = tl.cdiv(count * GROUP, BLOCK_M)
    # The positions that all tiles read, divided by `programs` and rounded up to blocks of keys.
    share = tl.cdiv(tl.maximum(tl.cdiv(tl.sum(tiles * length), PREFIXES.programs), 1), BLOCK_N) * BLOCK_N
    each = _split_positions(length, share, BLOCK_N, PREFIXES.most)
    splits = tl.cdiv(length, each)
    items = tiles * splits
    end = tl.cumsum(items, 0)
    own = (item >= end - items) & (item < end)
    found = tl.max(tl.where(own, group, -1))
    place = tl.sum(tl.where(own, item - (end - items), 0))
    splits = tl.maximum(tl.sum(tl.where(own, splits, 0)), 1)
    each = tl.sum(tl.where(own, each, 0))
    return found, place // splits, place % splits, splits, each


@triton.jit(do_not_specialize=["rows", "width"])
def shared_attention(
    out,
    sizes,
    out_splits,
    kv,
    q,
    positions,
    table,
    page_table,
    q_starts,
    kv_lens,
    slopes,
    sharing,
    q_weight,
    rows,
    width,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFIXES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute decode attention over prefixes that groups of sequences share. `decode_attention` merges the results.

    Grid: (largest possible number of items) * kv_heads. An item is a (group, tile of query rows, split of the prefix).
    `sharing` is the table of shared prefixes, with `rows` rows. Each sequence of a group has one token in the step.
    Unless HEAD is None, the kernel norms and rotates q.

    Results, where `most` is a field of PREFIXES:

    - `out` f32[sequences, kv_heads, most, group, dim]: attention over each split of the sequence's prefix
    - `sizes` f32[sequences, kv_heads, most, group]: the base-2 logarithm of each split's sum of weights
    - `out_splits` i32[sequences]: the number of splits
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % FORM.kv_heads
    item = tl.program_id(0) // FORM.kv_heads
    group, tile, split, splits, each = _find_item(item, sharing, rows, FORM.group, BLOCK_M, BLOCK_N, PREFIXES)
    if group < 0:
        return
    first = tl.load(sharing + group * COLUMNS + FIRST)
    count = tl.load(sharing + group * COLUMNS + COUNT)
    length = tl.load(sharing + group * COLUMNS + LENGTH)
    leader = tl.load(sharing + group * COLUMNS + LEADER)

    BLOCK: tl.constexpr = FORM.block
    d = tl.arange(0, BLOCK)
    nth = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    held = nth < count * FORM.group
    sequence = tl.load(sharing + (first + nth // FORM.group) * COLUMNS + MEMBER, mask=held, other=0)
    token = tl.load(q_starts + sequence, mask=held, other=0)
    at = token.to(tl.int64) * FED.q.token + (head * FORM.group + nth % FORM.group) * FED.q.head
    if HEAD is not None:
        cos, sin = angles(table, tl.load(positions + token, mask=held, other=0), HEAD)
        query = prepared(q, at, held, cos, sin, q_weight, HEAD)
    else:
        query = tl.load(q + at[:, None] + d[None, :], mask=held[:, None] & (d < FORM.dim)[None, :], other=0.0)

    total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), LOWEST, tl.float32)
    row_slopes = slopes_of(slopes, head * FORM.group + nth % FORM.group, held)
    places = nth  # unused without slopes
    if slopes is not None:
        places = tl.load(kv_lens + sequence, mask=held, other=1) - 1
    # Every row sees the whole prefix.
    total, weight_sum, peak = attended(
        total, weight_sum, peak, query, None, places, kv, page_table + leader.to(tl.int64) * width, head,
        split * each, tl.minimum((split + 1) * each, length), BLOCK_N,
        BLOCK_N, "bidirectional", False, SCORES, CACHE, FORM, ASSEMBLY, slopes=row_slopes,
    )  # fmt: skip
    row = ((sequence * FORM.kv_heads + head).to(tl.int64) * PREFIXES.most + split) * FORM.group + nth % FORM.group
    tl.store(
        out + row[:, None] * FORM.dim + d[None, :],
        total / weight_sum[:, None],
        mask=held[:, None] & (d < FORM.dim)[None, :],
    )
    tl.store(sizes + row, peak + tl.log2(weight_sum), mask=held)
    if (head == 0) & (split == 0):
        tl.store(out_splits + sequence, splits + tl.zeros_like(sequence), mask=held)
