"""Attention of steps that feed few tokens: the cached positions of a token are split over programs, to fill the device
however few tokens there are and however their contexts differ.

A work item is (token, head of k and v, split). Chunks of a context go to its splits in turns, so where the first chunk
of a split lies does not depend on how long the context is. All heads of q that share a head of k and v are rows of one
tile. The split of a (token, head) that ends last puts the splits together.

Grids know no lengths. Each (token, head) has BASE items for certain; programs behind those work out from the lengths,
on the device, which contexts are long enough for more splits, and take these.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention import (
    LOG2_E,
    LOWEST,
    attended,
    end_seen,
    first_seen,
    forgets,
    log_sum_exp,
    mean_of,
    rows_of,
    seen_by,
    weighed,
)
from ingot.backends.triton.kernels.attention_splits import (
    COLUMNS,
    OWN,
    contexts,
    further_item,
    owner_of,
    positions_read,
    put_together,
    share_of,
    splits_of,
    taken,
)
from ingot.backends.triton.kernels.cache_form import tail_of
from ingot.backends.triton.kernels.rope import angles, cache_rows, gains, prepared, turned, with_partners


@triton.jit
def _fetch_chunk(
    kv,
    pages,
    head,
    place,
    end,
    PAGE_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Ask for the keys and values at positions `place` below `end` to come into the L2 cache, and wait for nothing."""
    LINE: tl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (BLOCK_DIM + LINE - 1) // LINE
    inside = place < end
    # Positions past the end are asked for on page 0, again and again.
    rows = rows_of(kv, pages, place, inside, head, PAGE_STRIDE, SLOT_STRIDE, PAGE, DIM)
    line = tl.minimum(tl.arange(0, LINES) * LINE, DIM - 1)  # heads of 80 float32 end in the third of four
    for part in tl.static_range(2):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l",
            [(rows[:, None] + part * PART_STRIDE + line[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _with_prefix(
    weight_sum,
    peak,
    prefixes,
    prefix_sizes,
    prefix_splits,
    sequence,
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The state of rows that have seen a sink at most, after the prefix of their sequence, of which each of up to
    SPLITS splits has its attention in `prefixes`."""
    g = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, BLOCK_DIM)
    s = tl.arange(0, SPLITS)
    first = (sequence * KV_HEADS + head).to(tl.int64) * SPLITS
    splits = tl.load(prefix_splits + sequence)
    rows = (first + s)[:, None] * GROUP + g[None, :]
    size = tl.load(prefix_sizes + rows, mask=(s < splits)[:, None] & (g < GROUP)[None, :], other=LOWEST)
    higher = tl.maximum(peak, tl.max(size, 0))
    weight_sum = weight_sum * tl.exp2(peak - higher) + tl.sum(tl.exp2(size - higher[None, :]), 0)
    total = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for split in tl.static_range(SPLITS):
        # There is no loop: all splits are on their way at once.
        row = (first + split) * GROUP + g
        held = (g < GROUP) & (split < splits)
        part = tl.load(prefixes + row[:, None] * DIM + d[None, :], mask=held[:, None] & (d < DIM)[None, :], other=0.0)
        size = tl.load(prefix_sizes + row, mask=held, other=LOWEST)
        total += part * tl.exp2(size - higher)[:, None]
    return total, weight_sum, higher


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
    sharing,
    prefixes,
    prefix_sizes,
    prefix_splits,
    tokens,
    sequences,
    width,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    EPS: tl.constexpr,
    HEAD: tl.constexpr,
    POSITIONS: tl.constexpr,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    APPEND: tl.constexpr,
    SINGLE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BASE: tl.constexpr,
    SHARES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SCAN: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY_TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    FORM: tl.constexpr,
):
    """Grid: tokens * KV_HEADS * BASE items, and SHARES * KV_HEADS further ones; SHARES may be 0.

    `partial` f32[tokens, KV_HEADS, MAX_SPLITS, GROUP, V] takes the attention of each split (V: numbers of a value),
    `sizes` f32[tokens, KV_HEADS, MAX_SPLITS, GROUP] the logarithm in base 2 of what its weights add up to; `arrived`
    i32[tokens, KV_HEADS] counts the splits that have ended. `lse` f32[tokens, heads] takes the log-sum-exp of each row,
    if it is asked for.

    With SINGLE, only sequences that feed one token are computed, and no other row of `out` is written. Then the grid,
    `partial`, `sizes` and `arrived` have sequences in place of tokens. Lengths are looked at SCAN sequences at a time.

    With APPEND, q and k, whose heads are HEAD, are normed and rotated first, and k and v of a token go into the cache
    at its slot. What this step feeds is attended to as it comes from k and v: no program reads what another one writes
    here. The cache then holds what earlier steps wrote, and the page table comes from the host, so the first chunk is
    loaded before the kernels in front of this one have ended.

    With `sharing`, `prefixes`, `prefix_sizes` and `prefix_splits` are the results of `shared_attention`, and only
    positions after the prefixes are read here.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    # Rows that are not known to be cached may hold anything until the length is known; by it windows begin, and shared
    # prefixes say where contexts do.
    FORGETS: tl.constexpr = forgets(MASK)
    SHARED: tl.constexpr = sharing is not None
    KNOWN: tl.constexpr = APPEND and not FORGETS and not SHARED
    EARLY: tl.constexpr = KNOWN and EARLY_TILE
    item = tl.program_id(0)
    fed_by = sequences if SINGLE else tokens
    pairs = fed_by * KV_HEADS
    first_items = pairs * BASE
    head = item % KV_HEADS
    token = item // KV_HEADS % fed_by
    split = item // pairs
    d = tl.arange(0, BLOCK_DIM)
    VALUE_DIM: tl.constexpr = FORM.value_dim
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    e = tl.arange(0, BLOCK_VALUE)
    g = tl.arange(0, BLOCK_GROUP)
    own = (g < GROUP)[:, None] & (e < VALUE_DIM)[None, :]
    sequence = -1
    if item < first_items:
        sequence = token if SINGLE else owner_of(token, q_starts, q_lens, sequences, SCAN)
    early_place = split * CHUNK + tl.arange(0, CHUNK)
    if EARLY:
        held = (sequence >= 0) & (early_place // PAGE < width)
        pages = page_table + sequence.to(tl.int64) * width
        early_rows = rows_of(kv, pages, early_place, held, head, PAGE_STRIDE, SLOT_STRIDE, PAGE, DIM)
        early = held[:, None] & (d < DIM)[None, :]
        early_keys = tl.load(early_rows[:, None] + d[None, :], mask=early, other=0.0)
        early_values = tl.load(early_rows[:, None] + PART_STRIDE + d[None, :], mask=early, other=0.0)
    if KNOWN and DEPENDENT and AHEAD > 0:
        # By a guess of the length: in all layers but the first it has long been there.
        cached = tl.load(kv_lens + tl.maximum(sequence, 0), cache_modifier=".cg")
        cached = tl.where(sequence >= 0, tl.minimum(cached, width * PAGE), 0)
        for later in tl.static_range(EARLY, AHEAD + EARLY):
            _fetch_chunk(
                kv, page_table + sequence.to(tl.int64) * width, head, early_place + later * BASE * CHUNK, cached,
                PAGE_STRIDE, PART_STRIDE, SLOT_STRIDE, PAGE, DIM, BLOCK_DIM,
            )  # fmt: skip
    if APPEND:
        # A guess: in all layers but the first, the positions of this step have long been there.
        guess = tl.load(positions + token, cache_modifier=".cg")
        guess = tl.minimum(tl.maximum(guess, 0), POSITIONS - 1)
        # As many rows as the tile of q, and of k and v below: tiles of one shape have one layout, and nothing moves.
        cos, sin = angles(table, guess + tl.zeros_like(g), HEAD)
        q_gain, other_q_gain = gains(q_weight, HEAD)
        k_gain, other_k_gain = gains(k_weight, HEAD)
    if SHARES > 0:
        b = tl.arange(0, SCAN)
        counts = taken(tl.load(q_lens + b, mask=b < sequences, other=0), SINGLE)
    if DEPENDENT:
        gdc_wait()
    if SHARES > 0:
        lengths = contexts(kv_lens, sharing, b, sequences)

    if not SINGLE:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if (sequence < 0) & (split == 0):
            into = (
                out + (token * KV_HEADS + head).to(tl.int64) * (GROUP * VALUE_DIM) + g[:, None] * VALUE_DIM + e[None, :]
            )
            tl.store(into, tl.zeros((BLOCK_GROUP, BLOCK_VALUE), out.dtype.element_ty), mask=own)
            if lse is not None:
                nothing = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
                tl.store(lse + (token * KV_HEADS + head).to(tl.int64) * GROUP + g, nothing, mask=g < GROUP)
    place = 0
    more = 1
    if SHARES > 0:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if item >= first_items:
            share = share_of(
                counts, lengths, q_lens, kv_lens, sharing, sequences, SHARES, CHUNK, MASK, APPEND, SINGLE, SCAN
            )
            sequence, place, more = further_item(
                item - first_items, share, q_lens, kv_lens, sharing, sequences,
                KV_HEADS, BASE, MAX_SPLITS, MASK, APPEND, SINGLE, SCAN,
            )  # fmt: skip
    if sequence < 0:
        return
    first = tl.load(q_starts + sequence)
    count = tl.load(q_lens + sequence)
    length = tl.load(kv_lens + sequence)
    if SINGLE:
        if count != 1:
            return
        token = first
    if item >= first_items:
        split = BASE + place % more
        head = place // more % KV_HEADS
        token = first + place // more // KV_HEADS
    heads = head * GROUP + g
    rows = token.to(tl.int64) * Q_TOKEN + heads * Q_HEAD
    # All that does not depend on the length is asked for before the length is looked at.
    if APPEND:
        position = tl.load(positions + token, cache_modifier=".cg")
        slot = tl.load(slots + token)
        itself = g == 0
        own_q, other_q = with_partners(q, rows, g < GROUP, HEAD)
        from_k = token.to(tl.int64) * K_TOKEN + head * K_HEAD + tl.zeros_like(g)
        own_k, other_k = with_partners(k, from_k, itself, HEAD)
        from_v = v + token.to(tl.int64) * V_TOKEN + head * V_HEAD + tl.zeros_like(g)[:, None] + d[None, :]
        new_value = tl.load(from_v, mask=itself[:, None] & (d < DIM)[None, :], other=0.0)
        if position != guess:
            cos, sin = angles(table, position + tl.zeros_like(g), HEAD)
        dtype: tl.constexpr = q.dtype.element_ty
        query_tail = None
        query = turned(own_q, other_q, cos, sin, q_gain, other_q_gain, q_weight is not None, dtype, EPS, HEAD)
        new_key = turned(own_k, other_k, cos, sin, k_gain, other_k_gain, k_weight is not None, dtype, EPS, HEAD)
    else:
        query = tl.load(q + rows[:, None] + d[None, :], mask=(g < GROUP)[:, None] & (d < DIM)[None, :], other=0.0)
        query_tail = tail_of(q, rows, g < GROUP, DIM, BLOCK_DIM, FORM)

    splits = BASE
    if SHARES > 0:
        share = share_of(
            counts, lengths, q_lens, kv_lens, sharing, sequences, SHARES, CHUNK, MASK, APPEND, SINGLE, SCAN
        )
        context = length
        if SHARED:
            context -= tl.load(sharing + sequence * COLUMNS + OWN)
        splits = splits_of(positions_read(context, count, MASK, APPEND), share, BASE, MAX_SPLITS)
    nth = token - first
    cached = length - count
    own_place = cached + nth
    end = cached if APPEND else end_seen(own_place, length, MASK)
    low = 0
    if FORGETS:
        low = first_seen(own_place, MASK)
    elif SHARED:
        low = tl.load(sharing + sequence * COLUMNS + OWN)
    # Splits that have no chunk do not even count, but for one: where there is any, it takes what the step feeds, and
    # the first split does where there is none.
    chunks = tl.cdiv(tl.maximum(end - low, 0), CHUNK)
    feeding = 0
    if APPEND:
        feeding = tl.where((chunks > 1) & (chunks < splits), chunks, 0)
    splits = tl.minimum(splits, tl.maximum(chunks, feeding + 1))
    if split >= splits:
        return

    total = tl.zeros((BLOCK_GROUP, BLOCK_VALUE), tl.float32)
    weight_sum = tl.zeros((BLOCK_GROUP,), tl.float32)
    peak = tl.full((BLOCK_GROUP,), LOWEST, tl.float32)
    if sinks is not None:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if split == 0:
            peak = tl.load(sinks + heads, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2_E
            weight_sum = tl.full((BLOCK_GROUP,), 1.0, tl.float32)
    if SHARED:  # noqa: SIM102
        if (split == 0) & (low > 0):
            total, weight_sum, peak = _with_prefix(
                weight_sum, peak, prefixes, prefix_sizes, prefix_splits, sequence, head,
                KV_HEADS, GROUP, PREFIX_SPLITS, DIM, BLOCK_GROUP, BLOCK_DIM,
            )  # fmt: skip
    if APPEND:  # noqa: SIM102
        if split == feeding:
            into = (
                kv
                + cache_rows(slot, SLOT_STRIDE, PAGE_STRIDE, PAGE)
                + head * DIM
                + d[None, :]
                + tl.zeros_like(g)[:, None]
            )
            written = (slot >= 0) & itself[:, None] & (d < DIM)[None, :]
            tl.store(into, new_key, mask=written)
            tl.store(into + PART_STRIDE, new_value, mask=written)
            # The token itself is the first that the rows see.
            own_score = tl.dot(query, tl.trans(new_key), input_precision="ieee")
            total, weight_sum, peak = weighed(
                own_score, new_value, total, weight_sum, peak, itself[None, :], SCALE, SOFT_CAP
            )
            # Then those of its sequence that were fed in front of it.
            for start in tl.range(0, nth, 16, num_stages=1):
                fed = start + tl.arange(0, 16)
                seen = fed < nth
                seen = seen_by(seen, own_place, cached + fed, False, MASK)
                fed_k = (first + fed).to(tl.int64) * K_TOKEN + head * K_HEAD
                fed_v = (first + fed).to(tl.int64) * V_TOKEN + head * V_HEAD
                at = tl.load(positions + first + fed, mask=seen, other=0)
                fed_cos, fed_sin = angles(table, at, HEAD)
                keys = prepared(k, fed_k, seen, fed_cos, fed_sin, k_weight, EPS, HEAD)
                inside = seen[:, None] & (d < DIM)[None, :]
                values = tl.load(v + fed_v[:, None] + d[None, :], mask=inside, other=0.0)
                scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
                total, weight_sum, peak = weighed(
                    scores, values, total, weight_sum, peak, seen[None, :], SCALE, SOFT_CAP
                )

    begin = low + split * CHUNK
    if EARLY:  # noqa: SIM102
        if (item < first_items) & (split * CHUNK < end):
            inside = early_place < end
            scores = tl.dot(query, tl.trans(early_keys), input_precision="ieee")
            # What lies past the end may be NaN, which a weight of zero does not silence.
            values = tl.where(inside[:, None], early_values, 0.0)
            total, weight_sum, peak = weighed(scores, values, total, weight_sum, peak, inside[None, :], SCALE, SOFT_CAP)
            begin += splits * CHUNK
    if begin < end:
        pages = page_table + sequence.to(tl.int64) * width
        places = own_place + tl.zeros((BLOCK_GROUP,), tl.int32)
        # Every cached position from `low` on is seen.
        total, weight_sum, peak = attended(
            total, weight_sum, peak, query, query_tail, places, kv, pages, head, begin, end, splits * CHUNK,
            SCALE, "bidirectional", SOFT_CAP, False, PAGE_STRIDE, PART_STRIDE, SLOT_STRIDE, PAGE, DIM, BLOCK_DIM, CHUNK,
            FORM,
        )  # fmt: skip

    row = token * KV_HEADS + head
    mean = mean_of(total, weight_sum, lse)
    if splits == 1:
        into = out + row.to(tl.int64) * (GROUP * VALUE_DIM) + g[:, None] * VALUE_DIM + e[None, :]
        tl.store(into, mean.to(out.dtype.element_ty), mask=own)
        if lse is not None:
            tl.store(lse + row.to(tl.int64) * GROUP + g, log_sum_exp(weight_sum, peak), mask=g < GROUP)
        return
    pair = sequence * KV_HEADS + head if SINGLE else row
    here = pair * MAX_SPLITS + split
    tl.store(partial + here * (GROUP * VALUE_DIM) + g[:, None] * VALUE_DIM + e[None, :], mean, mask=own)
    tl.store(sizes + here * GROUP + g, peak + tl.log2(weight_sum), mask=g < GROUP)
    # One thread counts for all: what the others stored must be there before, and what it saw hold for them after.
    tl.debug_barrier()
    ended = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if ended == splits - 1:
        tl.store(arrived + pair, 0)
        put_together(
            out, lse, partial, sizes, row, pair, splits,
            GROUP, VALUE_DIM, BLOCK_VALUE, BLOCK_HEADS, MAX_SPLITS, BLOCK_SPLITS,
        )  # fmt: skip
