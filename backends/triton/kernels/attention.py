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
    """Return the scores of the dot products `scores` of q and keys: scaled, soft-capped, and multiplied by log2(e).

    The caller can then compute the softmax with exp2.
    """
    if SCORES.soft_cap is None:
        scores = scores * (SCORES.scale * LOG2_E)
    else:
        # tanh(x) is 2 sigmoid(2 x) - 1, and every target has sigmoid.
        capped = 2.0 * tl.sigmoid(scores * (2.0 * SCORES.scale / SCORES.soft_cap)) - 1.0
        scores = capped * (SCORES.soft_cap * LOG2_E)
    return scores


@triton.jit
def by_distance(scores, slopes, query, place):
    """Return scores [M, N] plus the ALiBi bias: slope times (key position - query position).

    `slopes` [M] are the slopes of the rows' q heads; None means no bias. `query` [M] are the positions of the queries,
    `place` [N] the positions of the keys.
    """
    if slopes is not None:
        distance = (place[None, :] - query[:, None]).to(tl.float32)
        scores = tl.fma(distance, tl.broadcast_to(slopes[:, None], scores.shape), scores)
    return scores


@triton.jit
def slopes_of(slopes, heads, held):
    """Load the ALiBi slopes of the q heads with indices `heads`, times log2(e); return None if `slopes` is None.

    `held` masks `heads`: a masked-out head gets slope 0.
    """
    found = None
    if slopes is not None:
        found = tl.load(slopes + heads, mask=held, other=0.0) * LOG2_E
    return found


@triton.jit
def weighed(
    scores, values, total, weight_sum, peak, seen, SCORES: tl.constexpr, slopes=None, query_places=None, places=None
):
    """Add N keys to the online-softmax state of M query rows, and return the new state (total, weight_sum, peak).

    The state is the weighted sum of values, the sum of weights and the largest score. `scores` [M, N] are the dot
    products of q and keys, before scaling. `values` [N, D] are the values of these keys, and `seen` [M, N] masks keys.
    `slopes` [M] are ALiBi slopes, or None; only with them are the rows' positions `query_places` [M] and the keys'
    `places` [N] used.
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
    """Return whether an attention mask hides old keys from all later tokens: true for windows and chunks."""
    return mask.startswith(("window_", "chunked_"))


@triton.jit
def first_seen(place, MASK: tl.constexpr):
    """Return the first position that a query at position `place` sees. MASK is "window_N" or "chunked_N"."""
    if kind_of(MASK) == "window":
        first = tl.maximum(place - size_of(MASK) + 1, 0)
    else:
        first = place // size_of(MASK) * size_of(MASK)
    return first


@triton.jit
def end_seen(place, length, MASK: tl.constexpr):
    """Return the position after the last one that a query at position `place` sees under the attention mask MASK.

    The sequence has `length` positions.
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
    """Return the bool mask `seen`, with False also for keys that the attention mask MASK hides from a query.

    `query` are the positions of queries, `place` those of keys; shapes broadcast. AHEAD says that keys may come after
    the last one that a query sees. Without it the caller excludes this, and the kernel does not test it.
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
    """Return the bool mask `seen`, with False also for draft-tree tokens that are no ancestors of the query's token.

    `node` is a key's index among the sequence's tokens of this step. An index below 0 is an earlier key, which all
    tokens see. Bit i of `ancestors` says that the query's token sees node i; 0 means that it sees every node. Shapes
    broadcast.
    """
    bit = (ancestors >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)) & 1
    return seen & ((node < 0) | ((bit != 0) & (node < 64)) | (ancestors == 0))


@triton.jit
def mean_of(total, weight_sum, lse, CACHE: tl.constexpr):
    """Return the attention of query rows from their online-softmax state: `total / weight_sum`.

    The cache stores values divided by its `v_scale`, so the result is multiplied by it. If `lse` is not None, rows that
    saw no key are zeros.
    """
    mean = total / weight_sum[:, None]
    if CACHE.v_scale != 1.0:
        mean = mean * CACHE.v_scale
    if lse is not None:
        mean = tl.where(weight_sum[:, None] > 0.0, mean, 0.0)
    return mean


@triton.jit
def log_sum_exp(weight_sum, peak):
    """Return the natural log-sum-exp of the scores of each query row; -inf for rows that saw no key.

    `weight_sum` and `peak` are the rows' online-softmax state, in base 2.
    """
    return (peak + tl.log2(weight_sum)) / LOG2_E


@triton.jit
def store_rows(out, lse, first, rows, held, mean, weight_sum, peak, FORM: tl.constexpr):
    """Write the attention `mean` [M, FORM.block_value] of M rows to `out`, and their log-sum-exp to `lse` if not None.

    A row is a (token, q head). Row i has the index `first` + `rows`[i]; `held` [M] masks rows. `weight_sum` and `peak`
    are the rows' online-softmax state.
    """
    e = tl.arange(0, FORM.block_value)
    into = out + first * FORM.value_dim + rows[:, None] * FORM.value_dim + e[None, :]
    tl.store(into, mean.to(out.dtype.element_ty), mask=held[:, None] & (e < FORM.value_dim)[None, :])
    if lse is not None:
        tl.store(lse + first + rows, log_sum_exp(weight_sum, peak), mask=held)


@triton.jit
def store_unowned(out, lse, first, rows, held, FORM: tl.constexpr):
    """Write the result rows of padding tokens: zeros to `out`, and, if `lse` is not None, -inf to `lse`.

    A row is a (token, q head). Row i has the index `first` + `rows`[i]; `held` [M] masks rows.
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
    """Increment `counter` in global memory, and return how many programs of the launch did so before this one.

    Afterwards, this program sees all that those programs wrote.
    """
    # One thread does the atomic for the block. The first barrier orders the stores of the other threads before it, and
    # the second one their loads after it.
    tl.debug_barrier()
    ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return ended


@triton.jit
def tail_of(q, rows, held, FORM: tl.constexpr):
    """Load the second tile [M, FORM.tail] of queries: the elements that do not fit into the first FORM.block columns.

    `rows` [M] are the queries' offsets in q, and `held` [M] masks them.
    """
    t = FORM.block + tl.arange(0, FORM.tail)
    return tl.load(q + rows[:, None] + t[None, :], mask=held[:, None] & (t < FORM.dim)[None, :], other=0.0)


@triton.jit
def rows_of(kv, pages, place, inside, head, CACHE: tl.constexpr):
    """Return pointers [N] to the cached keys of a k/v head at the positions `place` [N] of a sequence.

    `pages` points to the page ids of the sequence. Positions outside the mask `inside` point into page 0. CACHE is the
    memory layout of the cache.
    """
    page = tl.load(pages + place // CACHE.page, mask=inside, other=0).to(tl.int64)
    return kv + page * CACHE.page_stride + place % CACHE.page * CACHE.slot_stride + head * CACHE.row


@triton.jit
def cached_head(head, FORM: tl.constexpr):
    """Return the index of the cache head that the k/v head `head` reads. FORM.sharing adjacent k/v heads share one."""
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
    """Add cached keys and values of one sequence to the online-softmax state of M query rows, and return the new state.

    The state is `total` [M, FORM.block_value] (weighted sum of values), `weight_sum` [M] and `peak` [M] (largest
    score). The loop takes BLOCK_N positions from each of `begin`, `begin + step` and so on, up to `end`. `pages` points
    to the page ids of the sequence. `query` is [M, FORM.block], `query_tail` its other columns (`tail_of`),
    `query_places` [M] the rows' positions.

    MASK names the attention mask. AHEAD: some keys may be after the last one that a row sees. `ancestors` [M], unless
    None, say which positions from `cached` on a row sees (`seen_in_tree`). `slopes` [M] are ALiBi slopes (`slopes_of`).
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
    """Return how many of the tokens `first` to `end` - 1 of the step belong to a sequence; the others are padding.

    `q_starts` and `q_lens` are each sequence's first token and number of tokens. An iteration tests SCAN sequences.
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
    """Return a bool mask [N]: which of the step's tokens with indices `tokens` [N] are padding, in no sequence."""
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
    """Find the block of tokens with number `item` in the step: return (sequence, index in it, number of all blocks).

    The sequence is -1 if there is no such block. Sequences with at least LEAST tokens in the step are cut into blocks
    of BLOCK tokens, numbered sequence by sequence. Within a sequence, the last block has the lowest number. Each
    iteration tests SCAN sequences.
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
