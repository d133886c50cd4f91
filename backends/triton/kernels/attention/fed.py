"""Functions of `decode_attention` for the step's tokens: norm and rotate q and k, write k and v, attend to them."""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.attention.cache_dtype import as_cached, as_computed, row_scales, store_scales
from ingot.backends.triton.kernels.attention.constants import group_rows
from ingot.backends.triton.kernels.attention.parts import seen_by
from ingot.backends.triton.kernels.attention.softmax import Operands, weighed
from ingot.backends.triton.kernels.rope import angles, cache_rows, prepared, turned, with_partners


@triton.jit
def prepared_token(
    q,
    k,
    v,
    positions,
    table,
    slots,
    token,
    head,
    guess,
    cos,
    sin,
    q_gain,
    other_q_gain,
    k_gain,
    other_k_gain,
    NORMED_Q: tl.constexpr,
    NORMED_K: tl.constexpr,
    FED: tl.constexpr,
    FORM: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Load q, k and v of a (token, k/v head), and norm and rotate q and k.

    Return (query, new key, new value, cache slot). `query` [G, FORM.block] has a row per q head. The new key and value
    are row 0 of tiles [G, FORM.block].

    `cos` and `sin` [G, FORM.block] are the rotary angles at the position `guess`. If the guess is wrong, the function
    loads the right ones. `q_gain`, `k_gain` and the other gains are norm weights, from `gains`. NORMED_Q and NORMED_K
    say whether q and k have a norm.
    """
    d = tl.arange(0, FORM.block)
    g = tl.arange(0, group_rows(FORM))
    position = tl.load(positions + token, cache_modifier=".cg")
    slot = tl.load(slots + token)
    itself = g == 0
    from_q = token.to(tl.int64) * FED.q.token + (head * FORM.group + g) * FED.q.head
    own_q, other_q = with_partners(q, from_q, g < FORM.group, HEAD)
    from_k = token.to(tl.int64) * FED.k.token + head * FED.k.head + tl.zeros_like(g)
    own_k, other_k = with_partners(k, from_k, itself, HEAD)
    from_v = v + token.to(tl.int64) * FED.v.token + head * FED.v.head + tl.zeros_like(g)[:, None] + d[None, :]
    new_value = tl.load(from_v, mask=itself[:, None] & (d < FORM.dim)[None, :], other=0.0)
    if position != guess:
        cos, sin = angles(table, position + tl.zeros_like(g), HEAD)
    dtype: tl.constexpr = q.dtype.element_ty
    query = turned(own_q, other_q, cos, sin, q_gain, other_q_gain, NORMED_Q, dtype, HEAD)
    new_key = turned(own_k, other_k, cos, sin, k_gain, other_k_gain, NORMED_K, dtype, HEAD)
    return query, new_key, new_value, slot


@triton.jit
def write_cache(kv, slot, head, new_key, new_value, key_scale, value_scale, CACHE: tl.constexpr, FORM: tl.constexpr):
    """Write a token's key and value of one k/v head into the cache at `slot`. Skip a slot below 0, which is padding.

    The key is row 0 of `new_key` [G, FORM.block], and the value row 0 of `new_value`. Both have the dtype of the cache.
    `key_scale` [G] and `value_scale` [G] are the scales of rows, or None.
    """
    d = tl.arange(0, FORM.block)
    g = tl.arange(0, group_rows(FORM))
    rows = kv + cache_rows(slot, CACHE) + head * CACHE.row + tl.zeros_like(g)
    into = rows[:, None] + d[None, :]
    written = (slot >= 0) & (g == 0)[:, None] & (d < FORM.dim)[None, :]
    tl.store(into, new_key, mask=written)
    tl.store(into + CACHE.part_stride, new_value, mask=written)
    store_scales(rows, key_scale, (slot >= 0) & (g == 0), CACHE.key_scale)
    store_scales(rows, value_scale, (slot >= 0) & (g == 0), CACHE.value_scale)


@triton.jit
def with_fed(
    total,
    weight_sum,
    peak,
    query,
    new_key,
    new_value,
    key_scale,
    value_scale,
    kv,
    k,
    v,
    positions,
    table,
    k_weight,
    first,
    nth,
    cached,
    head,
    slopes,
    FED: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    SCORES: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Add a token, and its sequence's earlier tokens of this step, to the online-softmax state of the token.

    The state has G rows, the token's q heads. Return the new state (total, weight_sum, peak). The token is number `nth`
    of its sequence in this step, from 0. `first` is the index of the sequence's first token. The sequence has `cached`
    positions before the step. `new_key` and `new_value` are the token's own key and value, in the dtype of the cache.
    `key_scale` [G] and `value_scale` [G] are the scales of their rows, or None.
    Other keys and values are rounded as in the cache. `query` is [G, FORM.block]. `slopes` [G] are ALiBi slopes
    (`slopes_of`), or None.
    """
    MASK: tl.constexpr = SCORES.mask
    d = tl.arange(0, FORM.block)
    # The token itself is first. Its distance is 0, so slopes add nothing to its score.
    itself = tl.arange(0, group_rows(FORM)) == 0
    own_key, own_value = as_computed(new_key, query.dtype), as_computed(new_value, query.dtype)
    own_score = tl.dot(query, tl.trans(own_key), input_precision="ieee")
    operands = Operands(key_scales=key_scale, value_scales=value_scale)
    total, weight_sum, peak = weighed(own_score, own_value, total, weight_sum, peak, itself[None, :], operands, SCORES)
    # Then the earlier tokens of its sequence in this step.
    for start in tl.range(0, nth, 16, num_stages=1):
        fed = start + tl.arange(0, 16)
        seen = fed < nth
        seen = seen_by(seen, cached + nth, cached + fed, False, MASK)
        fed_k = (first + fed).to(tl.int64) * FED.k.token + head * FED.k.head
        fed_v = (first + fed).to(tl.int64) * FED.v.token + head * FED.v.head
        at = tl.load(positions + first + fed, mask=seen, other=0)
        fed_cos, fed_sin = angles(table, at, HEAD)
        keys = prepared(k, fed_k, seen, fed_cos, fed_sin, k_weight, HEAD)
        key_scales = row_scales(keys, kv, CACHE)
        keys = as_computed(as_cached(keys, kv, CACHE.k_scale, key_scales), query.dtype)
        inside = seen[:, None] & (d < FORM.dim)[None, :]
        values = tl.load(v + fed_v[:, None] + d[None, :], mask=inside, other=0.0)
        value_scales = row_scales(values, kv, CACHE)
        values = as_computed(as_cached(values, kv, CACHE.v_scale, value_scales), query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        fed_operands = Operands(
            slopes=slopes, query_places=nth + tl.zeros((query.shape[0],), tl.int32), places=fed, key_scales=key_scales,
            value_scales=value_scales,
        )  # fmt: skip
        total, weight_sum, peak = weighed(scores, values, total, weight_sum, peak, seen[None, :], fed_operands, SCORES)
    return total, weight_sum, peak
