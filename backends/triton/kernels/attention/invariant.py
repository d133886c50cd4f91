"""Batch-invariant attention: the bits of a row depend only on the token's own context.

One kernel serves prefill and decode. The state is that of the online softmax.

    for each tile (tokens of one sequence times the q heads of one kv head), by `ways` programs:
        for each split of the positions that the tile sees, the programs taking turns:
            part = the state after the split's blocks of keys, from an empty state
            if one program has the tile: merge part into the state, which begins with the sink
            else: write part
        if there are several programs: the last of them to end merges all parts, from the first one on
        write the attention

Blocks of BLOCK_N keys begin at multiples of BLOCK_N, and splits of SPLIT positions at multiples of SPLIT. A split is
summed from an empty state, and splits are merged from the first one on. The terms of a row's sums and their order
therefore follow from its position. Other tokens of the step and the chunks of a prefill change no bit. A block in which
a row sees no key adds zeros to sums that are multiplied by one.

The rows of a tile are TILE_TOKENS tokens of one sequence times the q heads that share a kv head. `ways` programs share
the splits of a tile. A single program merges as it goes; of several, the last one to end merges.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.parts import (
    attended,
    block_of_item,
    end_seen,
    ended_before,
    first_seen,
    forgets,
    owned_between,
    store_rows,
    store_unowned,
    tail_of,
    unowned,
)
from ingot.backends.triton.kernels.attention.softmax import LOG2_E, LOWEST, mean_of, slopes_of


@triton.jit
def _joined(total, weight_sum, peak, part, part_sum, part_peak):
    """Merge the online-softmax state of a split into the state of the splits before it. Return the merged state.

    The split's state is `part` (weighted sum of values), `part_sum` (sum of weights) and `part_peak` (largest score).
    Multiply-adds are explicit fma calls. Otherwise the compiler would fuse some of them, and the bits could vary.
    """
    higher = tl.maximum(peak, part_peak)
    shrunk, share = tl.exp2(peak - higher), tl.exp2(part_peak - higher)
    total = tl.fma(
        part, tl.broadcast_to(share[:, None], total.shape), total * tl.broadcast_to(shrunk[:, None], total.shape)
    )
    return total, tl.fma(part_sum, share, weight_sum * shrunk), higher


@triton.jit
def _store_part(partial, sizes, at, g, own, part, part_sum, part_peak, FORM: tl.constexpr):
    """Write the online-softmax state of a split, for M query rows, to the scratch memory `partial` and `sizes`.

    `at` [M] is the index of each row's (token, k/v head, split). `g` [M] is the number of its q head within the group
    of the k/v head. `own` [M] masks rows.
    """
    e = tl.arange(0, FORM.block_value)
    here = at * FORM.group + g
    held = own[:, None] & (e < FORM.value_dim)[None, :]
    tl.store(partial + here[:, None] * FORM.value_dim + e[None, :], part, mask=held)
    here = at * (2 * FORM.group) + g
    tl.store(sizes + here, part_sum, mask=own)
    tl.store(sizes + here + FORM.group, part_peak, mask=own)


@triton.jit
def _load_part(partial, sizes, at, g, own, FORM: tl.constexpr):
    """Load the online-softmax state of a split that `_store_part` wrote. Return (total, weight_sum, peak) of M rows.

    The loads bypass the L1 cache (".cg"), because other multiprocessors wrote the state during this launch.
    """
    e = tl.arange(0, FORM.block_value)
    here = at * FORM.group + g
    held = own[:, None] & (e < FORM.value_dim)[None, :]
    part = tl.load(partial + here[:, None] * FORM.value_dim + e[None, :], mask=held, other=0.0, cache_modifier=".cg")
    here = at * (2 * FORM.group) + g
    part_sum = tl.load(sizes + here, mask=own, other=0.0, cache_modifier=".cg")
    part_peak = tl.load(sizes + here + FORM.group, mask=own, other=LOWEST, cache_modifier=".cg")
    return part, part_sum, part_peak


@triton.jit(do_not_specialize=["tokens", "sequences", "width", "ways"])
def invariant_attention(
    out,
    lse,
    partial,
    sizes,
    arrived,
    kv,
    q,
    page_table,
    q_starts,
    q_lens,
    kv_lens,
    sinks,
    slopes,
    tokens,
    sequences,
    width,
    ways,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute batch-invariant attention over a paged KV cache, for prefill and decode.

    The arguments `kv` to `slopes` are those of the op `paged_attention`. Grid: kv_heads, blocks of TILE_TOKENS tokens
    of a sequence, ways. A context is cut into splits of SPLIT positions. Up to `ways` programs share the splits of a
    block. A program without a block only writes zeros for padding.

    With more than one way, the programs merge their results through scratch memory, with splits = cdiv(width * page,
    SPLIT):

    - `partial` f32[tokens, kv_heads, splits, group, value_dim]: the weighted sum of values of each split
    - `sizes` f32[tokens, kv_heads, splits, 2, group]: the sum of weights and the largest score of each split
    - `arrived` i32[tokens, kv_heads]: how many programs of a block have ended, at the block's first token

    `lse` f32[tokens, heads], unless None, receives the log-sum-exp of each row.
    """
    MASK: tl.constexpr = SCORES.mask
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    way = tl.program_id(2)
    sequence, block, _ = block_of_item(item, q_lens, sequences, TILE_TOKENS, 1, 32)
    d = tl.arange(0, FORM.block)
    HEADS: tl.constexpr = FORM.kv_heads * FORM.group
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    ROWS: tl.constexpr = TILE_TOKENS * FORM.block_group
    r = tl.arange(0, ROWS)
    g = r % FORM.block_group
    begin = item * TILE_TOKENS
    last = tl.minimum(begin + TILE_TOKENS, tokens)
    if (way == 0) & (owned_between(begin, last, q_starts, q_lens, sequences, 32) < last - begin):
        row = begin + r // FORM.block_group
        free = unowned(row, q_starts, q_lens, sequences) & (row < tokens) & (g < FORM.group)
        store_unowned(out, lse, 0, row.to(tl.int64) * HEADS + head * FORM.group + g, free, FORM)
    if sequence < 0:
        return

    start = tl.load(q_starts + sequence)
    count = tl.load(q_lens + sequence)
    cached = tl.load(kv_lens + sequence) - count
    nth = block * TILE_TOKENS + r // FORM.block_group
    own = (nth < count) & (g < FORM.group)
    held = own[:, None] & (d < FORM.dim)[None, :]
    token = (start + nth).to(tl.int64)
    heads = head * FORM.group + g
    query = tl.load(q + (token * FED.q.token + heads * FED.q.head)[:, None] + d[None, :], mask=held, other=0.0)
    query_tail = None
    if FORM.tail > 0:
        query_tail = tail_of(q, token * FED.q.token + heads * FED.q.head, own, FORM)
    places = cached + nth
    pages = page_table + sequence.to(tl.int64) * width
    end = tl.minimum(end_seen(cached + (block + 1) * TILE_TOKENS - 1, cached + count, MASK), cached + count)
    low = 0
    if forgets(MASK):
        low = first_seen(cached + block * TILE_TOKENS, MASK) // BLOCK_N * BLOCK_N
    first = low // SPLIT
    splits = tl.cdiv(end, SPLIT)
    sharing = tl.minimum(ways, splits - first)
    if lse is not None:
        sharing = tl.maximum(sharing, 1)  # a tile that sees no key still writes zeros and -inf
    if way >= sharing:
        return

    total = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + heads, mask=g < FORM.group, other=0.0).to(tl.float32) * LOG2_E
        weight_sum = tl.full((ROWS,), 1.0, tl.float32)
    row_slopes = slopes_of(slopes, heads, g < FORM.group)
    stored = tl.cdiv(width * CACHE.page, SPLIT)
    pair = (token * FORM.kv_heads + head) * stored
    for split in range(first + way, splits, sharing):
        part = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
        part_sum = tl.zeros((ROWS,), tl.float32)
        part_peak = tl.full((ROWS,), LOWEST, tl.float32)
        part, part_sum, part_peak = attended(
            part, part_sum, part_peak, query, query_tail, places, kv, pages, head,
            tl.maximum(split * SPLIT, low), tl.minimum((split + 1) * SPLIT, end), BLOCK_N,
            BLOCK_N, MASK, True, SCORES, CACHE, FORM, ASSEMBLY, slopes=row_slopes,
        )  # fmt: skip
        if sharing == 1:
            total, weight_sum, peak = _joined(total, weight_sum, peak, part, part_sum, part_peak)
        else:
            _store_part(partial, sizes, pair + split, g, own, part, part_sum, part_peak, FORM)
    if sharing > 1:
        counter = arrived + (start + block * TILE_TOKENS) * FORM.kv_heads + head
        if ended_before(counter) < sharing - 1:
            return
        tl.store(counter, 0)
        for split in range(first, splits):
            part, part_sum, part_peak = _load_part(partial, sizes, pair + split, g, own, FORM)
            total, weight_sum, peak = _joined(total, weight_sum, peak, part, part_sum, part_peak)
    mean = mean_of(total, weight_sum, lse, CACHE)
    store_rows(out, lse, 0, token * HEADS + heads, own, mean, weight_sum, peak, FORM)
