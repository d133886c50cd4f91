"""What attention kernels share: a walk over the pages of a sequence, and the tokens that no sequence owns.

Softmax in base 2 with running maxima (FlashAttention-2, arXiv 2307.08691): of the keys seen so far a row holds the
largest score, the sum of weights against it, and the weighted sum of values.
"""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.cache_dtype import as_computed

# Stands for the largest score of no scores at all: below every score, and finite, so that differences are numbers.
LOWEST = tl.constexpr(-1.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def in_base_two(scores, SCORES: tl.constexpr):
    """Products of q and keys, scaled and capped, as exponents of two."""
    if SCORES.soft_cap is None:
        scores = scores * (SCORES.scale * LOG2_E)
    else:
        # tanh by the logistic function, which every target has.
        capped = 2.0 * tl.sigmoid(scores * (2.0 * SCORES.scale / SCORES.soft_cap)) - 1.0
        scores = capped * (SCORES.soft_cap * LOG2_E)
    return scores


@triton.jit
def by_distance(scores, slopes, query, place):
    """Exponents of two, plus what the `slopes` [M] of rows at the positions `query` [M] add for keys at the positions
    `place` [N]; None: nothing."""
    if slopes is not None:
        distance = (place[None, :] - query[:, None]).to(tl.float32)
        scores = tl.fma(distance, tl.broadcast_to(slopes[:, None], scores.shape), scores)
    return scores


@triton.jit
def slopes_of(slopes, heads, held):
    """Slopes of the heads of q `heads`, where `held`, for exponents of two; None where there are none."""
    found = None
    if slopes is not None:
        found = tl.load(slopes + heads, mask=held, other=0.0) * LOG2_E
    return found


@triton.jit
def weighed(
    scores, values, total, weight_sum, peak, seen, SCORES: tl.constexpr, slopes=None, query_places=None, places=None
):
    """Keys with `scores` [M, N] (before scaling) and `values` [N, D] join the running state of M rows, where `seen`.
    With the `slopes_of` the rows their positions `query_places` [M] and those of the keys, `places` [N], count."""
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
    """Of the name of a mask (`ingot.ir.masks`) what is in front of its size."""
    return mask.rstrip("0123456789").rstrip("_")


@triton.constexpr_function
def size_of(mask):
    """The size of a mask, by its name."""
    return int(mask.rpartition("_")[2])


@triton.constexpr_function
def forgets(mask):
    """Whether what a query does not see any more is seen by none after it."""
    return mask.startswith(("window_", "chunked_"))


@triton.jit
def first_seen(place, MASK: tl.constexpr):
    """The first position that a query at `place` sees, by a mask that forgets."""
    if kind_of(MASK) == "window":
        first = tl.maximum(place - size_of(MASK) + 1, 0)
    else:
        first = place // size_of(MASK) * size_of(MASK)
    return first


@triton.jit
def end_seen(place, length, MASK: tl.constexpr):
    """The position after the last one that a query at `place` sees. The sequence has `length` positions."""
    if MASK == "bidirectional":
        end = length
    elif kind_of(MASK) == "block_causal":
        end = tl.minimum((place // size_of(MASK) + 1) * size_of(MASK), length)
    else:
        end = place + 1
    return end


@triton.jit
def seen_by(seen, query, place, AHEAD: tl.constexpr, MASK: tl.constexpr):
    """`seen`, less the positions `place` that queries at `query` do not see. AHEAD: some may lie after the last one
    seen. The three have shapes that broadcast."""
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
    """`seen`, less the nodes `node` of the step that tokens with the bits `ancestors` do not see; below 0 a position is
    cached, and a token without bits sees all. The three have shapes that broadcast."""
    bit = (ancestors >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)) & 1
    return seen & ((node < 0) | ((bit != 0) & (node < 64)) | (ancestors == 0))


@triton.jit
def mean_of(total, weight_sum, lse, CACHE: tl.constexpr):
    """The attention of rows from what they add up to. Where log-sum-exp is asked for, a row may see nothing: zero."""
    mean = total / weight_sum[:, None]
    if CACHE.v_scale != 1.0:
        mean = mean * CACHE.v_scale
    if lse is not None:
        mean = tl.where(weight_sum[:, None] > 0.0, mean, 0.0)
    return mean


@triton.jit
def log_sum_exp(weight_sum, peak):
    """By the running state of rows; -inf where nothing was seen."""
    return (peak + tl.log2(weight_sum)) / LOG2_E


@triton.jit
def leave(out, lse, first, rows, held, mean, weight_sum, peak, FORM: tl.constexpr):
    """Write the attention `mean` [M, FORM.block_value] of M rows, which have the numbers first + rows [M] among all
    (token, head of q), where `held` [M]; and their log-sum-exp, unless `lse` is None."""
    e = tl.arange(0, FORM.block_value)
    into = out + first * FORM.value_dim + rows[:, None] * FORM.value_dim + e[None, :]
    tl.store(into, mean.to(out.dtype.element_ty), mask=held[:, None] & (e < FORM.value_dim)[None, :])
    if lse is not None:
        tl.store(lse + first + rows, log_sum_exp(weight_sum, peak), mask=held)


@triton.jit
def leave_nothing(out, lse, first, rows, held, FORM: tl.constexpr):
    """Write what rows have that no sequence owns, as `leave` does: zeros, and -inf as their log-sum-exp."""
    BLOCK_VALUE: tl.constexpr = FORM.block_value
    e = tl.arange(0, BLOCK_VALUE)
    into = out + first * FORM.value_dim + rows[:, None] * FORM.value_dim + e[None, :]
    nothing = tl.zeros((rows.shape[0], BLOCK_VALUE), out.dtype.element_ty)
    tl.store(into, nothing, mask=held[:, None] & (e < FORM.value_dim)[None, :])
    if lse is not None:
        tl.store(lse + first + rows, tl.full(rows.shape, float("-inf"), tl.float32), mask=held)


@triton.jit
def ended_before(counter):
    """How many programs have ended before this one; what they wrote can be read from here on."""
    # One thread counts for all: what the others stored must be there before, and what it saw hold for them after.
    tl.debug_barrier()
    ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return ended


@triton.jit
def tail_of(q, rows, held, FORM: tl.constexpr):
    """What the first tile of queries leaves over, at the offsets `rows` [M] of q, where `held` [M]: [M, FORM.tail]."""
    t = FORM.block + tl.arange(0, FORM.tail)
    return tl.load(q + rows[:, None] + t[None, :], mask=held[:, None] & (t < FORM.dim)[None, :], other=0.0)


@triton.jit
def rows_of(kv, pages, place, inside, head, CACHE: tl.constexpr):
    """Where the cache holds a head's keys at the positions `place` [N] of the sequence with page ids `pages`, as
    pointers; those not `inside` are on page 0."""
    page = tl.load(pages + place // CACHE.page, mask=inside, other=0).to(tl.int64)
    return kv + page * CACHE.page_stride + place % CACHE.page * CACHE.slot_stride + head * CACHE.row


@triton.jit
def cached_head(head, FORM: tl.constexpr):
    """The head of the cache that a head of the grid reads."""
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
    """Of the cached positions begin … end - 1 of the sequence with page ids `pages`, the first BLOCK_N of every `step`
    join the state of M rows: `total` [M, FORM.block_value], `weight_sum` and `peak` [M].

    `query` is [M, FORM.block], `query_tail` what that leaves over, and `query_places` [M] are the rows' own positions.
    They see by MASK; AHEAD: some positions may lie after the last one that a row sees. `ancestors` [M] are bits of the
    positions from `cached` on that a row of a tree sees. `slopes` [M] are the `slopes_of` the rows.
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
    """How many of the tokens first … end - 1 sequences own. SCAN sequences are looked at together."""
    owned = 0
    for nth in range(0, sequences, SCAN):
        b = nth + tl.arange(0, SCAN)
        start = tl.load(q_starts + b, mask=b < sequences, other=0)
        count = tl.load(q_lens + b, mask=b < sequences, other=0)
        owned += tl.sum(tl.maximum(tl.minimum(start + count, end) - tl.maximum(start, first), 0))
    return owned


@triton.jit
def unowned(tokens, q_starts, q_lens, sequences):
    """Which of `tokens` [N] no sequence owns."""
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
    """Of the blocks of BLOCK tokens that sequences of LEAST tokens or more feed, those of each from its last one down,
    the one with the number `item`: (its sequence or -1, its place there, how many blocks there are). SCAN sequences are
    looked at together."""
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
