"""Decode attention (split-K over the context): several programs share the cached positions of one token.

This fills the device with few tokens and with contexts of very different lengths.

    for each item (token, kv head, split), one program:
        before the previous kernel has ended: load or prefetch cached keys and values, and angles, for guessed positions
        wait for the previous kernel
        find the item: one of the `base` splits of each (token, head), or an additional split of a long context
        query, new key = q and k of the token, normed and rotated; or q as it is
        state = the sink of each row and the shared prefix, in the first split
        if this split adds the tokens of the step: write the new key and value into the cache; add the step's tokens
            of the sequence, up to this one
        for every chunk of the split: add its positions to the state
        if there is one split: write the attention
        else: write the state of the split; the last split to end merges all of them, or the kernel `merge_attention`
            does

The state is that of the online softmax. The splits of a context take its chunks in turn. A split's first chunk
therefore does not depend on the length of the context. All q heads that share a kv head are rows of one tile.

The grid does not depend on lengths. The first programs take `base` splits of each (token, head). The programs after
them take the additional splits of long contexts. They compute from the lengths which contexts have such splits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.cache_dtype import as_cached, row_scales
from ingot.backends.triton.kernels.attention.constants import group_rows
from ingot.backends.triton.kernels.attention.early import (
    early_chunk,
    early_scales,
    fetch_ahead,
    guessed_angles,
    with_early,
)
from ingot.backends.triton.kernels.attention.fed import prepared_token, with_fed, write_cache
from ingot.backends.triton.kernels.attention.pairs import has_pairs
from ingot.backends.triton.kernels.attention.parts import (
    attended,
    ended_before,
    forgets,
    given_query,
    query_rows,
    store_rows,
    store_unowned,
    tail_of,
)
from ingot.backends.triton.kernels.attention.softmax import LOG2_E, LOWEST, mean_of, slopes_of
from ingot.backends.triton.kernels.attention.splits import (
    COLUMNS,
    OWN,
    contexts,
    further_item,
    merge_splits,
    owner_of,
    positions_read,
    seen_range,
    share_of,
    splits_of,
    store_split,
    taken,
    used_splits,
)
from ingot.backends.triton.kernels.rope import gains


@triton.jit
def _with_prefix(
    weight_sum,
    peak,
    prefixes,
    prefix_sizes,
    prefix_splits,
    sequence,
    head,
    FORM: tl.constexpr,
    PREFIXES: tl.constexpr,
):
    """Add the shared prefix of a sequence to the online-softmax state of its G rows (q heads).

    Return the state (total, weight_sum, peak). Before, it is empty or holds an attention sink, so it has no `total`
    yet. The kernel `shared_attention` wrote the other inputs:

    - `prefixes`: the attention over each split of the prefix
    - `prefix_sizes`: the base-2 logarithms of the splits' sums of weights
    - `prefix_splits`: the number of splits of each sequence
    """
    g = tl.arange(0, group_rows(FORM))
    BLOCK: tl.constexpr = FORM.block
    d = tl.arange(0, BLOCK)
    MOST: tl.constexpr = PREFIXES.most
    s = tl.arange(0, MOST)
    first = (sequence * FORM.kv_heads + head).to(tl.int64) * MOST
    splits = tl.load(prefix_splits + sequence)
    rows = (first + s)[:, None] * FORM.group + g[None, :]
    size = tl.load(prefix_sizes + rows, mask=(s < splits)[:, None] & (g < FORM.group)[None, :], other=LOWEST)
    higher = tl.maximum(peak, tl.max(size, 0))
    weight_sum = weight_sum * tl.exp2(peak - higher) + tl.sum(tl.exp2(size - higher[None, :]), 0)
    total = tl.zeros((group_rows(FORM), BLOCK), tl.float32)
    for split in tl.static_range(MOST):
        # Unrolled, so that the loads of all splits are in flight at once.
        row = (first + split) * FORM.group + g
        held = (g < FORM.group) & (split < splits)
        inside = held[:, None] & (d < FORM.dim)[None, :]
        part = tl.load(prefixes + row[:, None] * FORM.dim + d[None, :], mask=inside, other=0.0)
        size = tl.load(prefix_sizes + row, mask=held, other=LOWEST)
        total += part * tl.exp2(size - higher)[:, None]
    return total, weight_sum, higher


@triton.jit
def _first_state(
    sinks,
    sharing,
    prefixes,
    prefix_sizes,
    prefix_splits,
    sequence,
    head,
    split,
    low,
    FORM: tl.constexpr,
    PREFIXES: tl.constexpr,
):
    """Return the online-softmax state that a split begins with: total [G, FORM.block_value], weight_sum [G], peak [G].

    Split 0 begins with the attention sinks and the shared prefix, if there are any. Other splits begin with an empty
    state. `low` is the first position that the splits read. It is 0 if the sequence has no shared prefix.
    """
    ROWS: tl.constexpr = group_rows(FORM)
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    g = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    if sinks is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if split == 0:
            peak = tl.load(sinks + head * FORM.group + g, mask=g < FORM.group, other=0.0).to(tl.float32) * LOG2_E
            weight_sum = tl.full((ROWS,), 1.0, tl.float32)
    if sharing is not None:  # noqa: SIM102
        if (split == 0) & (low > 0):
            total, weight_sum, peak = _with_prefix(
                weight_sum, peak, prefixes, prefix_sizes, prefix_splits, sequence, head, FORM, PREFIXES
            )
    return total, weight_sum, peak


@triton.jit(do_not_specialize=["tokens", "sequences", "width"])
def decode_attention(
    out,
    lse,
    partial,
    sizes,
    arrived,
    kv,
    q,
    k,
    v,
    positions,
    table,
    slots,
    page_table,
    q_starts,
    q_lens,
    kv_lens,
    q_weight,
    k_weight,
    sinks,
    slopes,
    sharing,
    prefixes,
    prefix_sizes,
    prefix_splits,
    tokens,
    sequences,
    width,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    HEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFIXES: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute decode attention over a paged KV cache, for steps of few tokens. Several programs share a context.

    The arguments `kv` to `slopes` are those of the ops `append_attention` and `paged_attention`. The constants are
    defined in attention_constants.py. A split is the part of a context that one program reads.

    Grid: first tokens * kv_heads * base programs. Then shares * kv_heads more programs compute additional splits of
    long contexts. `base`, `most` and `shares` are fields of SPLITS; `shares` may be 0.

    Scratch and results:

    - `partial` f32[tokens, kv_heads, most, group, value_dim]: the attention of each split
    - `sizes` f32[tokens, kv_heads, most, group]: the base-2 logarithm of each split's sum of weights
    - `arrived` i32[tokens, kv_heads]: how many splits have ended. With SPLITS.apart, the result is the number of splits
      of each context. `merge_attention` then merges those with two or more
    - `lse` f32[tokens, heads] or None: the log-sum-exp of each row

    With SPLITS.single, the kernel computes only sequences with one token in the step, and writes only their rows. The
    grid, `partial`, `sizes` and `arrived` then have sequences in place of tokens.

    Unless HEAD is None, the kernel first norms and rotates q and k, and writes k and v into the cache. It reads the
    tokens of this step from k and v, rounded as the cache rounds them. No program therefore reads what another program
    writes. The cache contents that it reads are from earlier steps, so it can load them before the previous kernels
    have ended.

    `sharing` is the table of shared prefixes, or None. With it, the kernel reads only positions after the prefixes.
    `prefixes`, `prefix_sizes` and `prefix_splits` are then results of `shared_attention`.
    """
    MASK: tl.constexpr = SCORES.mask
    if DEPENDENT:
        gdc_launch_dependents()
    APPEND: tl.constexpr = HEAD is not None
    # KNOWN: the first position to read is 0, which is known before the lengths. With windows and chunks it depends on
    # the length, with shared prefixes on the prefix. Without APPEND, an earlier kernel of this step writes rows that
    # this one reads.
    KNOWN: tl.constexpr = APPEND and not forgets(MASK) and sharing is None
    LOADS_EARLY: tl.constexpr = KNOWN and EARLY.tile
    PAIRS: tl.constexpr = has_pairs(kv.dtype, q.dtype.element_ty, CACHE, FORM, group_rows(FORM))
    ROWS: tl.constexpr = group_rows(FORM)

    # The item of this program if it takes one of the `base` splits. Additional items are found below, by the lengths.
    item = tl.program_id(0)
    fed_by = sequences if SPLITS.single else tokens
    pairs = fed_by * FORM.kv_heads
    first_items = pairs * SPLITS.base
    head = item % FORM.kv_heads
    token = item // FORM.kv_heads % fed_by
    split = item // pairs
    g = tl.arange(0, ROWS)
    own = g < FORM.group
    # Computed here and not at the end, where ptxas spills for sm_90 with values of 64 elements and keys of 128.
    inside = own[:, None] & (tl.arange(0, FORM.block_value) < FORM.value_dim)[None, :]
    sequence = -1
    if item < first_items:
        sequence = token if SPLITS.single else owner_of(token, q_starts, q_lens, sequences, SPLITS.scan)

    # Before the previous kernel has ended.
    early_place = split * SPLITS.chunk + tl.arange(0, SPLITS.chunk)
    if LOADS_EARLY:
        early_keys, early_values = early_chunk(kv, page_table, sequence, head, early_place, width, CACHE, FORM, PAIRS)
        early_key_scales = early_scales(kv, page_table, sequence, head, early_place, width, CACHE, FORM, False)
        early_value_scales = early_scales(kv, page_table, sequence, head, early_place, width, CACHE, FORM, True)
    if KNOWN and DEPENDENT and EARLY.ahead > 0:
        fetch_ahead(
            kv, kv_lens, page_table, sequence, head, early_place, width, LOADS_EARLY, CACHE, FORM, SPLITS, EARLY
        )
    if APPEND:
        guess, cos, sin = guessed_angles(positions, table, token, FORM, HEAD, EARLY)
        q_gain, other_q_gain = gains(q_weight, HEAD)
        k_gain, other_k_gain = gains(k_weight, HEAD)
    if SPLITS.shares > 0:
        b = tl.arange(0, SPLITS.scan)
        counts = taken(tl.load(q_lens + b, mask=b < sequences, other=0), SPLITS)
    if DEPENDENT:
        gdc_wait()
    if SPLITS.shares > 0:
        lengths = contexts(kv_lens, sharing, b, sequences)

    # After the previous kernel: the item of this program, from the lengths.
    if not SPLITS.single:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if (sequence < 0) & (split == 0):
            store_unowned(out, lse, (token * FORM.kv_heads + head).to(tl.int64) * FORM.group, g, own, FORM)
            if SPLITS.apart:
                tl.store(arrived + token * FORM.kv_heads + head, 0)
    place = 0
    more = 1
    if SPLITS.shares > 0:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if item >= first_items:
            share = share_of(counts, lengths, q_lens, kv_lens, sharing, sequences, SCORES, SPLITS)
            sequence, place, more = further_item(
                item - first_items, share, q_lens, kv_lens, sharing, sequences, FORM, SCORES, SPLITS
            )
    if sequence < 0:
        return
    first = tl.load(q_starts + sequence)
    count = tl.load(q_lens + sequence)
    length = tl.load(kv_lens + sequence)
    if SPLITS.single:
        if count != 1:
            if SPLITS.apart:
                tl.store(arrived + sequence * FORM.kv_heads + head, 0, mask=item < pairs)
            return
        token = first
    if item >= first_items:
        split = SPLITS.base + place % more
        head = place // more % FORM.kv_heads
        token = first + place // more // FORM.kv_heads

    # q and k. Loads that do not depend on the length are issued before the first use of the length.
    if APPEND:
        query, new_key, new_value, slot = prepared_token(
            q, k, v, positions, table, slots, token, head, guess, cos, sin, q_gain, other_q_gain, k_gain, other_k_gain,
            q_weight is not None, k_weight is not None, FED, FORM, HEAD,
        )  # fmt: skip
        query_tail = None
    else:
        rows = query_rows(token, head, FED, FORM)
        query = given_query(q, rows, FORM)
        query_tail = None
        if FORM.tail > 0:
            query_tail = tail_of(q, rows, tl.arange(0, group_rows(FORM)) < FORM.group, FORM)

    # The positions that the splits read.
    splits = SPLITS.base
    if SPLITS.shares > 0:
        share = share_of(counts, lengths, q_lens, kv_lens, sharing, sequences, SCORES, SPLITS)
        context = length
        if sharing is not None:
            context -= tl.load(sharing + sequence * COLUMNS + OWN)
        splits = splits_of(positions_read(context, count, SCORES, SPLITS), share, SPLITS)
    nth = token - first
    cached = length - count
    own_place = cached + nth
    low, end = seen_range(own_place, cached, length, sharing, sequence, SCORES, SPLITS)
    splits, feeding = used_splits(splits, low, end, SPLITS)
    if split >= splits:
        return

    # The state before any own key: the sink and the shared prefix.
    total, weight_sum, peak = _first_state(
        sinks, sharing, prefixes, prefix_sizes, prefix_splits, sequence, head, split, low, FORM, PREFIXES
    )
    row_slopes = slopes_of(slopes, head * FORM.group + g, own)
    if APPEND:  # noqa: SIM102
        if split == feeding:
            key_scale = row_scales(new_key, kv, CACHE)
            value_scale = row_scales(new_value, kv, CACHE)
            kept_key = as_cached(new_key, kv, CACHE.k_scale, key_scale)
            kept_value = as_cached(new_value, kv, CACHE.v_scale, value_scale)
            write_cache(kv, slot, head, kept_key, kept_value, key_scale, value_scale, CACHE, FORM)
            total, weight_sum, peak = with_fed(
                total, weight_sum, peak, query, kept_key, kept_value, key_scale, value_scale, kv, k, v, positions,
                table, k_weight, first, nth, cached, head, row_slopes, FED, CACHE, FORM, SCORES, HEAD,
            )  # fmt: skip

    # The chunks of the split.
    begin = low + split * SPLITS.chunk
    if LOADS_EARLY:  # noqa: SIM102
        if (item < first_items) & (split * SPLITS.chunk < end):
            total, weight_sum, peak = with_early(
                total, weight_sum, peak, query, early_keys, early_values, early_key_scales, early_value_scales,
                early_place < end, kv, CACHE, SCORES, PAIRS, ASSEMBLY, row_slopes,
                own_place + tl.zeros((ROWS,), tl.int32), early_place,
            )  # fmt: skip
            begin += splits * SPLITS.chunk
    if begin < end:
        pages = page_table + sequence.to(tl.int64) * width
        places = own_place + tl.zeros((ROWS,), tl.int32)
        total, weight_sum, peak = attended(
            total, weight_sum, peak, query, query_tail, places, kv, pages, head, begin, end, splits * SPLITS.chunk,
            SPLITS.chunk, "bidirectional", False, SCORES, CACHE, FORM, ASSEMBLY, slopes=row_slopes,
        )  # fmt: skip

    # The result.
    row = token * FORM.kv_heads + head
    pair = sequence * FORM.kv_heads + head if SPLITS.single else row
    if SPLITS.apart:
        tl.store(arrived + pair, splits, mask=split == 0)
    mean = mean_of(total, weight_sum, lse, CACHE)
    if splits == 1:
        store_rows(out, lse, row.to(tl.int64) * FORM.group, g, own, mean, weight_sum, peak, FORM)
        return
    store_split(partial, sizes, pair * SPLITS.most + split, inside, mean, weight_sum, peak, FORM)
    if not SPLITS.apart:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if ended_before(arrived + pair) == splits - 1:
            tl.store(arrived + pair, 0)
            merge_splits(out, lse, partial, sizes, row, pair, splits, FORM, SPLITS)
