"""Parts that the attention kernels share: masks, the online softmax, the loop over pages, and padding tokens.

The softmax is in base 2 with running maxima (FlashAttention-2, arXiv 2307.08691). The softmax state of a row covers the
keys added so far: `total` is the weighted sum of values, `weight_sum` the sum of weights, `peak` the largest score.
Weights are relative to the peak. `held`, `inside`, `seen` and `own` are bool masks of a tile. A sequence owns the
tokens that it has in the step; padding tokens are unowned.
"""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.cache_dtype import as_computed

# The peak before any score: below every score, and finite, so that differences of peaks are never NaN.
LOWEST = tl.constexpr(-1.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def in_base_two(scores, SCORES: tl.constexpr):
    """Scale and soft-cap the dot products of q and keys, and return scores for a softmax in base 2 (times log2 e)."""
    if SCORES.soft_cap is None:
        scores = scores * (SCORES.scale * LOG2_E)
    else:
        # tanh(x) is 2 sigmoid(2 x) - 1, and every target has sigmoid.
        capped = 2.0 * tl.sigmoid(scores * (2.0 * SCORES.scale / SCORES.soft_cap)) - 1.0
        scores = capped * (SCORES.soft_cap * LOG2_E)
    return scores


@triton.jit
def by_distance(scores, slopes, query, place):
    """Add the ALiBi bias, slope times (key position - query position), to scores [M, N], and return them.

    `slopes` [M] are those of the rows, or None for no bias. `query` [M] are the positions of the queries, `place` [N]
    those of the keys.
    """
    if slopes is not None:
        distance = (place[None, :] - query[:, None]).to(tl.float32)
        scores = tl.fma(distance, tl.broadcast_to(slopes[:, None], scores.shape), scores)
    return scores


@triton.jit
def slopes_of(slopes, heads, held):
    """Load the ALiBi slopes of the q heads `heads`, times log2 e; return None if `slopes` is None.

    `held` masks the heads.
    """
    found = None
    if slopes is not None:
        found = tl.load(slopes + heads, mask=held, other=0.0) * LOG2_E
    return found


@triton.jit
def weighed(
    scores, values, total, weight_sum, peak, seen, SCORES: tl.constexpr, slopes=None, query_places=None, places=None
):
    """Add N keys to the softmax state of M rows, and return the new state (total, weight_sum, peak).

    `scores` [M, N] are the dot products of q and keys before scaling, `values` [N, D] those of the keys. `seen` [M, N]
    masks the keys. `slopes` [M] come from `slopes_of`; only with them are the positions of the rows, `query_places`
    [M], and of the keys, `places` [N], used.
    """
    scores = by_distance(in_base_two(scores, SCORES), slopes, query_places, places)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(peak - higher)
    weight_sum = weight_sum * shrunk + tl.sum(weights, 1)
    total = tl.dot(weights.to(values.dtype), values, total * shrunk[:, None], input_precision="ieee")
    return total, weight_sum, higher


@triton.constexpr_function
def kind_of(mask):
    """Return the name of an attention mask without its size: "window" for "window_128"."""
    return mask.rstrip("0123456789").rstrip("_")


@triton.constexpr_function
def size_of(mask):
    """Return the size in the name of an attention mask: 128 for "window_128"."""
    return int(mask.rpartition("_")[2])


@triton.constexpr_function
def forgets(mask):
    """Return whether an attention mask hides old keys for good: those before a window or a chunk."""
    return mask.startswith(("window_", "chunked_"))


@triton.jit
def first_seen(place, MASK: tl.constexpr):
    """Return the first position that a query at position `place` sees. MASK is a window or chunked mask."""
    if kind_of(MASK) == "window":
        first = tl.maximum(place - size_of(MASK) + 1, 0)
    else:
        first = place // size_of(MASK) * size_of(MASK)
    return first


@triton.jit
def end_seen(place, length, MASK: tl.constexpr):
    """Return the end of the positions that a query at position `place` sees, in a sequence of `length` positions.

    The end is the position after the last one.
    """
    if MASK == "bidirectional":
        end = length
    elif kind_of(MASK) == "block_causal":
        end = tl.minimum((place // size_of(MASK) + 1) * size_of(MASK), length)
    else:
        end = place + 1
    return end


@triton.jit
def seen_by(seen, query, place, AHEAD: tl.constexpr, MASK: tl.constexpr):
    """Return the bool mask `seen`, with keys set to False that MASK hides from a query. Shapes broadcast.

    `query` are the positions of queries, `place` those of keys. Without AHEAD, no key is after the last one that a
    query sees, and that is not tested.
    """
    if AHEAD:
        if kind_of(MASK) == "block_causal":
            seen = seen & (place < (query // size_of(MASK) + 1) * size_of(MASK))
        elif MASK != "bidirectional":
            seen = seen & (place <= query)
    if kind_of(MASK) == "window":
        seen = seen & (place > query - size_of(MASK))
    elif kind_of(MASK) == "chunked":
        seen = seen & (place >= query // size_of(MASK) * size_of(MASK))
    return seen


@triton.jit
def seen_in_tree(seen, ancestors, node):
    """Return the bool mask `seen`, with keys set to False that are not ancestors of a token in its tree.

    `node` is the index of a key among the sequence's tokens of this step; below 0 it is an earlier key, which all
    tokens see. Bit i of `ancestors` says that the token sees node i; a token without bits sees every node. Shapes
    broadcast.
    """
    bit = (ancestors >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)) & 1
    return seen & ((node < 0) | ((bit != 0) & (node < 64)) | (ancestors == 0))


@triton.jit
def mean_of(total, weight_sum, lse, CACHE: tl.constexpr):
    """Return the attention of rows from their softmax state: `total / weight_sum`, times the scale of cached values.

    Unless `lse` is None, rows that saw no key are zeros.
    """
    mean = total / weight_sum[:, None]
    if CACHE.v_scale != 1.0:
        mean = mean * CACHE.v_scale
    if lse is not None:
        mean = tl.where(weight_sum[:, None] > 0.0, mean, 0.0)
    return mean


@triton.jit
def log_sum_exp(weight_sum, peak):
    """Return the natural log-sum-exp of rows from their softmax state; -inf for rows that saw no key."""
    return (peak + tl.log2(weight_sum)) / LOG2_E


@triton.jit
def store_rows(out, lse, first, rows, held, mean, weight_sum, peak, FORM: tl.constexpr):
    """Write the attention `mean` [M, FORM.block_value] of M rows to `out`, and their log-sum-exp to `lse`, unless None.

    `first` + `rows` [M] are the indices of the rows among all (token, q head); `held` [M] masks them. `weight_sum` and
    `peak` are their softmax state.
    """
    e = tl.arange(0, FORM.block_value)
    into = out + first * FORM.value_dim + rows[:, None] * FORM.value_dim + e[None, :]
    tl.store(into, mean.to(out.dtype.element_ty), mask=held[:, None] & (e < FORM.value_dim)[None, :])
    if lse is not None:
        tl.store(lse + first + rows, log_sum_exp(weight_sum, peak), mask=held)


@triton.jit
def store_unowned(out, lse, first, rows, held, FORM: tl.constexpr):
    """Write rows of padding tokens: zeros to `out`, and -inf as log-sum-exp to `lse`, unless None.

    `first` + `rows` [M] are the indices of the rows among all (token, q head); `held` [M] masks them.
    """
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    e = tl.arange(0, BLOCK_VALUE)
    into = out + first * FORM.value_dim + rows[:, None] * FORM.value_dim + e[None, :]
    nothing = tl.zeros((rows.shape[0], BLOCK_VALUE), out.dtype.element_ty)
    tl.store(into, nothing, mask=held[:, None] & (e < FORM.value_dim)[None, :])
    if lse is not None:
        tl.store(lse + first + rows, tl.full(rows.shape, float("-inf"), tl.float32), mask=held)


@triton.jit
def ended_before(counter):
    """Increment `counter`, and return how many programs did so before this one.

    All that these programs wrote is visible to this one afterwards.
    """
    # One thread does the atomic for the block. The first barrier orders the stores of the other threads before it, and
    # the second one their loads after it.
    tl.debug_barrier()
    ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return ended


@triton.jit
def tail_of(q, rows, held, FORM: tl.constexpr):
    """Load the second tile [M, FORM.tail] of queries whose heads do not fit into one tile of FORM.block columns.

    `rows` [M] are their offsets in q, and `held` [M] masks them.
    """
    t = FORM.block + tl.arange(0, FORM.tail)
    return tl.load(q + rows[:, None] + t[None, :], mask=held[:, None] & (t < FORM.dim)[None, :], other=0.0)


@triton.jit
def rows_of(kv, pages, place, inside, head, CACHE: tl.constexpr):
    """Return pointers [N] to the cached keys of a head at the positions `place` [N] of a sequence.

    `pages` points to the page ids of the sequence. Positions outside the mask `inside` point into page 0.
    """
    page = tl.load(pages + place // CACHE.page, mask=inside, other=0).to(tl.int64)
    return kv + page * CACHE.page_stride + place % CACHE.page * CACHE.slot_stride + head * CACHE.row


@triton.jit
def cached_head(head, FORM: tl.constexpr):
    """Return the cache head that the kv head `head` reads. FORM.sharing kv heads in a row read the same one."""
    if FORM.sharing > 1:
        head = head // FORM.sharing
    return head


@triton.jit
def attended(
    total,
    weight_sum,
    peak,
    query,
    query_tail,
    query_places,
    kv,
    pages,
    head,
    begin,
    end,
    step,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    AHEAD: tl.constexpr,
    SCORES: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    ancestors=None,
    cached=0,
    slopes=None,
):
    """Add cached keys and values of one sequence to the softmax state of M rows, and return the new state.

    The state is `total` [M, FORM.block_value], `weight_sum` [M] and `peak` [M]. It adds BLOCK_N positions from each of
    `begin`, `begin + step` and so on, up to `end`. `pages` points to the page ids of the sequence. `query` is
    [M, FORM.block], `query_tail` its other columns (`tail_of`), `query_places` [M] the rows' positions.

    MASK names the attention mask. AHEAD: some keys may be after the last one that a row sees. `ancestors` [M], unless
    None, say which positions from `cached` on a row sees (`seen_in_tree`). `slopes` [M] come from `slopes_of`.
    """
    d = tl.arange(0, FORM.block)
    e = tl.arange(0, FORM.block_value)
    for start in range(begin, end, step):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < end
        rows = rows_of(kv, pages, place, inside, cached_head(head, FORM), CACHE)
        held = inside[:, None] & (d < FORM.dim)[None, :]
        keys = as_computed(tl.load(rows[:, None] + d[None, :], mask=held, other=0.0), query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if FORM.tail > 0:
            t = FORM.block + tl.arange(0, FORM.tail)
            ends = tl.load(rows[:, None] + t[None, :], mask=inside[:, None] & (t < FORM.dim)[None, :], other=0.0)
            ends = as_computed(ends, query.dtype)
            scores = tl.dot(query_tail, tl.trans(ends), scores, input_precision="ieee")
        seen = seen_by(inside[None, :], query_places[:, None], place[None, :], AHEAD, MASK)
        if ancestors is not None:
            seen = seen_in_tree(seen, ancestors[:, None], (place - cached)[None, :])
        if FORM.same:
            values = keys
        else:
            held = inside[:, None] & (e < FORM.value_dim)[None, :]
            values = tl.load(rows[:, None] + CACHE.part_stride + e[None, :], mask=held, other=0.0)
            values = as_computed(values, query.dtype)
        total, weight_sum, peak = weighed(
            scores, values, total, weight_sum, peak, seen, SCORES, slopes, query_places, place
        )
    return total, weight_sum, peak


@triton.jit
def owned_between(first, end, q_starts, q_lens, sequences, SCAN: tl.constexpr):
    """Return how many of the tokens `first` to `end` - 1 belong to a sequence; the others are padding.

    Each iteration tests SCAN sequences.
    """
    owned = 0
    for nth in range(0, sequences, SCAN):
        b = nth + tl.arange(0, SCAN)
        start = tl.load(q_starts + b, mask=b < sequences, other=0)
        count = tl.load(q_lens + b, mask=b < sequences, other=0)
        owned += tl.sum(tl.maximum(tl.minimum(start + count, end) - tl.maximum(start, first), 0))
    return owned


@triton.jit
def unowned(tokens, q_starts, q_lens, sequences):
    """Return the mask [N] of those of the `tokens` [N] that belong to no sequence."""
    owned = tl.zeros(tokens.shape, tl.int32)
    for first in range(0, sequences, 32):
        b = first + tl.arange(0, 32)
        start = tl.load(q_starts + b, mask=b < sequences, other=0)
        count = tl.load(q_lens + b, mask=b < sequences, other=0)
        hits = (tokens[:, None] >= start[None, :]) & (tokens[:, None] < (start + count)[None, :])
        owned += tl.sum(hits.to(tl.int32), 1)
    return owned == 0


@triton.jit
def block_of_item(item, q_lens, sequences, BLOCK: tl.constexpr, LEAST: tl.constexpr, SCAN: tl.constexpr):
    """Find the block of tokens with number `item` in the step.

    Return (its sequence, its index in the sequence, the number of all blocks); the sequence is -1 if there is no such
    block. Sequences with at least LEAST tokens in the step are cut into blocks of BLOCK tokens, numbered sequence by
    sequence. Within a sequence the last block comes first. Each iteration tests SCAN sequences.
    """
    sequence = -1
    block = 0
    before = 0
    for first in range(0, sequences, SCAN):
        b = first + tl.arange(0, SCAN)
        count = tl.load(q_lens + b, mask=b < sequences, other=0)
        blocks = tl.where(count >= LEAST, tl.cdiv(count, BLOCK), 0)
        end = before + tl.cumsum(blocks, 0)
        own = (item >= end - blocks) & (item < end)
        sequence = tl.maximum(sequence, tl.max(tl.where(own, b, -1)))
        block += tl.sum(tl.where(own, end - 1 - item, 0))
        before += tl.sum(blocks)
    return sequence, block, before
