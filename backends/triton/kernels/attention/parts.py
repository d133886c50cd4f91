"""Parts that the attention kernels share: masks, the loop over pages, stores of results, and padding tokens.

`held`, `inside`, `seen` and `own` are bool masks of a tile. A sequence owns the tokens that it has in the step; padding
tokens are unowned. softmax.py describes the state of a query row.
"""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.attention.addresses import cached_head, rows_of
from ingot.backends.triton.kernels.attention.cache_dtype import (
    as_computed,
    as_multiplied,
    key_scales_of,
    query_scales_of,
    value_scales_of,
    values_dtype,
)
from ingot.backends.triton.kernels.attention.constants import group_rows
from ingot.backends.triton.kernels.attention.pairs import halves, has_pairs, joined, load_pairs, weighed_pairs
from ingot.backends.triton.kernels.attention.softmax import Operands, log_sum_exp, weighed


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
    """Return whether an attention mask hides old keys from all later tokens. Window and chunked masks do."""
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
    """Return 1 + the last position that a query at position `place` sees under the attention mask MASK.

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
    """Return the bool mask `seen`, set to False where the attention mask MASK hides a key from a query.

    `query` are positions of queries, and `place` positions of keys. Their shapes broadcast. AHEAD must be true if a key
    may come after the last one that its query sees. If it is false, the kernel skips that comparison.
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
    """Return the bool mask `seen`, set to False where the draft tree hides a key from a query.

    In a draft tree, a token sees only its ancestors. `node` is the index of a key among the sequence's tokens of this
    step. It is negative for keys of earlier steps, which all tokens see. `ancestors` is a bit set per query: bit i lets
    the query see node i, and 0 lets it see every node. Shapes broadcast.
    """
    bit = (ancestors >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)) & 1
    return seen & ((node < 0) | ((bit != 0) & (node < 64)) | (ancestors == 0))


@triton.jit
def store_rows(out, lse, first, rows, held, mean, weight_sum, peak, FORM: tl.constexpr):
    """Write the attention `mean` [M, FORM.block_value] of M rows to `out`, and their log-sum-exp to `lse` if not None.

    A row is a (token, q head). Row i has the index `first` + `rows`[i] in `out`. `held` [M] masks rows. `weight_sum`
    and `peak` are the rows' online-softmax state.
    """
    e = tl.arange(0, FORM.block_value)
    into = out + first * FORM.value_dim + rows[:, None] * FORM.value_dim + e[None, :]
    tl.store(into, mean.to(out.dtype.element_ty), mask=held[:, None] & (e < FORM.value_dim)[None, :])
    if lse is not None:
        tl.store(lse + first + rows, log_sum_exp(weight_sum, peak), mask=held)


@triton.jit
def store_unowned(out, lse, first, rows, held, FORM: tl.constexpr):
    """Write the rows of tokens of padding, or that see no key: zeros to `out`, and -inf to `lse` if not None.

    A row is a (token, q head). Row i has the index `first` + `rows`[i] in `out`. `held` [M] masks rows.
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
    """Increment `counter` in global memory, and return its earlier value: how many programs have ended before this one.

    Afterwards, this program sees all that those programs wrote.
    """
    # One thread does the atomic for the block. The first barrier orders the stores of the other threads before it, and
    # the second one their loads after it.
    tl.debug_barrier()
    ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return ended


@triton.jit
def query_rows(token, head, FED: tl.constexpr, FORM: tl.constexpr):
    """Return the offsets [G] in q of the G q heads that share the k/v head `head`, for one token."""
    g = tl.arange(0, group_rows(FORM))
    return token.to(tl.int64) * FED.q.token + (head * FORM.group + g) * FED.q.head


@triton.jit
def given_query(q, rows, FORM: tl.constexpr):
    """Load the first tile [G, FORM.block] of G q heads, without norm or rotary embedding.

    `rows` [G] are the offsets of the heads in q.
    """
    d = tl.arange(0, FORM.block)
    own = tl.arange(0, group_rows(FORM)) < FORM.group
    return tl.load(q + rows[:, None] + d[None, :], mask=own[:, None] & (d < FORM.dim)[None, :], other=0.0)


@triton.jit
def tail_of(q, rows, held, FORM: tl.constexpr):
    """Load the columns of queries after the first FORM.block ones, as a tile [M, FORM.tail].

    `rows` [M] are the offsets of the queries in q. `held` [M] masks them.
    """
    t = FORM.block + tl.arange(0, FORM.tail)
    return tl.load(q + rows[:, None] + t[None, :], mask=held[:, None] & (t < FORM.dim)[None, :], other=0.0)


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
    ASSEMBLY: tl.constexpr,
    ancestors=None,
    cached=0,
    slopes=None,
):
    """Add cached keys and values of one sequence to the online-softmax state of M query rows. Return the new state.

    The state is `total` [M, FORM.block_value] (weighted sum of values), `weight_sum` [M] and `peak` [M] (largest
    score). `query` [M, FORM.block] are the rows, `query_tail` their columns from FORM.block on (`tail_of`), and
    `query_places` [M] their positions. `pages` points to the page ids of the sequence.

    An iteration reads BLOCK_N positions. Iterations start at `begin`, `begin + step` and so on, before `end`.

    MASK names the attention mask. AHEAD must be true if some of these positions may be after a row's own. `ancestors`
    [M] are bit sets of draft-tree ancestors (`seen_in_tree`), or None; bit 0 is position `cached`. `slopes` [M] are
    ALiBi slopes (`slopes_of`), or None. ASSEMBLY is that of `as_computed`.
    """
    d = tl.arange(0, FORM.block)
    e = tl.arange(0, FORM.block_value)
    PAIRS: tl.constexpr = has_pairs(kv.dtype, query.dtype, CACHE, FORM, total.shape[0])
    GIVEN: tl.constexpr = query.dtype
    query_scales = query_scales_of(query, query_tail, kv)
    query = as_multiplied(query, query_scales)
    VALUES: tl.constexpr = values_dtype(GIVEN, query.dtype, CACHE)
    if FORM.tail > 0:
        query_tail = as_multiplied(query_tail, query_scales)
    if PAIRS:
        first_total, second_total = halves(total)
    for start in range(begin, end, step):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < end
        rows = rows_of(kv, pages, place, inside, cached_head(head, FORM), CACHE)
        held = inside[:, None] & (d < FORM.dim)[None, :]
        keys = as_computed(tl.load(rows[:, None] + d[None, :], mask=held, other=0.0), query.dtype, ASSEMBLY)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if FORM.tail > 0:
            t = FORM.block + tl.arange(0, FORM.tail)
            ends = tl.load(rows[:, None] + t[None, :], mask=inside[:, None] & (t < FORM.dim)[None, :], other=0.0)
            ends = as_computed(ends, query.dtype, ASSEMBLY)
            scores = tl.dot(query_tail, tl.trans(ends), scores, input_precision="ieee")
        seen = seen_by(inside[None, :], query_places[:, None], place[None, :], AHEAD, MASK)
        if ancestors is not None:
            seen = seen_in_tree(seen, ancestors[:, None], (place - cached)[None, :])
        if PAIRS:
            values = load_pairs(kv, pages, place, inside, cached_head(head, FORM), CACHE, FORM)
        elif FORM.same:
            values = as_computed(keys, VALUES, ASSEMBLY)
        else:
            held = inside[:, None] & (e < FORM.value_dim)[None, :]
            values = tl.load(rows[:, None] + CACHE.part_stride + e[None, :], mask=held, other=0.0)
            values = as_computed(values, VALUES, ASSEMBLY)
        operands = Operands(
            slopes=slopes, query_places=query_places, places=place, query_scales=query_scales,
            key_scales=key_scales_of(rows, inside, CACHE), value_scales=value_scales_of(rows, inside, CACHE),
        )  # fmt: skip
        if PAIRS:
            first_total, second_total, weight_sum, peak = weighed_pairs(
                scores, values, first_total, second_total, weight_sum, peak, seen, kv, operands, SCORES, ASSEMBLY
            )
        else:
            total, weight_sum, peak = weighed(scores, values, total, weight_sum, peak, seen, operands, SCORES)
    if PAIRS:
        total = joined(first_total, second_total)
    return total, weight_sum, peak


@triton.jit
def owned_between(first, end, q_starts, q_lens, sequences, SCAN: tl.constexpr):
    """Return how many of the step's tokens `first` to `end` - 1 belong to a sequence. The rest is padding.

    `q_starts` and `q_lens` are the first token and the number of tokens of each sequence. A loop iteration tests SCAN
    sequences.
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
    """Return a bool mask [N]: which tokens are padding, in no sequence. `tokens` [N] are their indices in the step."""
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

    Return (sequence, block index in the sequence, number of blocks of the step). The sequence is -1 if there is no such
    block. Only sequences with at least LEAST tokens in the step have blocks. A block has BLOCK tokens. Blocks are
    numbered sequence by sequence, from the last block of a sequence to its first. A loop iteration tests SCAN
    sequences.
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
