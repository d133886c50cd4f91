"""The online softmax in base 2 with running maxima (FlashAttention-2, arXiv 2307.08691).

The state of a query row covers the keys added so far: `total` is the weighted sum of values, `weight_sum` the sum of
weights, `peak` the largest score. Weights are relative to the peak.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# The peak before any score: below every score, and finite, so that differences of peaks are never NaN.
LOWEST = tl.constexpr(-1.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)


class Operands(NamedTuple):
    """The inputs of a softmax step besides scores, values and masks, for M query rows and N keys.

    An input that the attention does not have is None. Slopes need both positions. Scales multiply queries, keys and
    values. Callers name the fields, because Triton does not hash their order.
    """

    slopes: tl.tensor | None = None  # [M]: ALiBi slopes (`slopes_of`)
    query_places: tl.tensor | None = None  # [M]: positions of the rows
    places: tl.tensor | None = None  # [N]: positions of the keys
    query_scales: tl.tensor | None = None  # [M]
    key_scales: tl.tensor | None = None  # [N]
    value_scales: tl.tensor | None = None  # [N]


@triton.jit
def in_base_two(scores, query_scales, SCORES: tl.constexpr):
    """Scale and soft-cap the dot products `scores` [M, N] of q and keys, and multiply them by log2(e).

    The caller can then compute the softmax with exp2 in place of exp. `query_scales` [M] multiply the rows of q. None
    means that nothing does.
    """
    if query_scales is not None and SCORES.soft_cap is None:
        scores = scores * (query_scales * (SCORES.scale * LOG2_E))[:, None]
    elif query_scales is not None:
        capped = 2.0 * tl.sigmoid(scores * (query_scales * (2.0 * SCORES.scale / SCORES.soft_cap))[:, None]) - 1.0
        scores = capped * (SCORES.soft_cap * LOG2_E)
    elif SCORES.soft_cap is None:
        scores = scores * (SCORES.scale * LOG2_E)
    else:
        # tanh(x) is 2 sigmoid(2 x) - 1, and every target has sigmoid.
        capped = 2.0 * tl.sigmoid(scores * (2.0 * SCORES.scale / SCORES.soft_cap)) - 1.0
        scores = capped * (SCORES.soft_cap * LOG2_E)
    return scores


@triton.jit
def by_distance(scores, slopes, query, place):
    """Return scores [M, N] plus the ALiBi bias: slope times (key position - query position).

    `slopes` [M] has the slope of each row's q head; None means no bias. `query` [M] are positions of queries, and
    `place` [N] positions of keys.
    """
    if slopes is not None:
        distance = (place[None, :] - query[:, None]).to(tl.float32)
        scores = tl.fma(distance, tl.broadcast_to(slopes[:, None], scores.shape), scores)
    return scores


@triton.jit
def slopes_of(slopes, heads, held):
    """Load the ALiBi slopes of the q heads with indices `heads`, times log2(e). Return None if `slopes` is None.

    `held` masks `heads`. A masked-out head gets slope 0.
    """
    found = None
    if slopes is not None:
        found = tl.load(slopes + heads, mask=held, other=0.0) * LOG2_E
    return found


@triton.jit
def softmax_step(scores, weight_sum, peak, seen, operands, SCORES: tl.constexpr):
    """Add the scores of N keys to the sums of M query rows. Return (weights, shrunk, weight_sum, peak).

    `weights` [M, N] multiply the values of these keys, and `shrunk` [M] the weighted sum of values so far. The other
    arguments are those of `weighed`.
    """
    if operands.key_scales is not None:
        scores = scores * operands.key_scales[None, :]
    scores = in_base_two(scores, operands.query_scales, SCORES)
    scores = by_distance(scores, operands.slopes, operands.query_places, operands.places)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(peak - higher)
    weight_sum = weight_sum * shrunk + tl.sum(weights, 1)
    return weights, shrunk, weight_sum, higher


@triton.jit
def weighed(scores, values, total, weight_sum, peak, seen, operands, SCORES: tl.constexpr):
    """Add N keys to the online-softmax state of M query rows, and return the new state.

    The state is (`total`, `weight_sum`, `peak`): the weighted sum of values, the sum of weights, the largest score.
    `scores` [M, N] are the dot products of q and keys, before scaling. `values` [N, D] belong to these keys, and `seen`
    [M, N] masks keys. `operands` are `Operands`.
    """
    weights, shrunk, weight_sum, peak = softmax_step(scores, weight_sum, peak, seen, operands, SCORES)
    if operands.value_scales is not None:
        if values.dtype == tl.float16:
            # Weights times scales may be too small for float16, while scaled values never are.
            values = (values.to(tl.float32) * operands.value_scales[:, None]).to(tl.float16)
        else:
            weights = weights * operands.value_scales[None, :]
    total = tl.dot(weights.to(values.dtype), values, total * shrunk[:, None], input_precision="ieee")
    return total, weight_sum, peak


@triton.jit
def mean_of(total, weight_sum, lse, CACHE: tl.constexpr):
    """Return the attention of query rows from their online-softmax state: `total / weight_sum`.

    The cache stores values divided by its `v_scale`, so the result is multiplied by it. If `lse` is not None, rows that
    saw no key become zeros.
    """
    mean = total / weight_sum[:, None]
    if CACHE.v_scale != 1.0:
        mean = mean * CACHE.v_scale
    if lse is not None:
        mean = tl.where(weight_sum[:, None] > 0.0, mean, 0.0)
    return mean


@triton.jit
def log_sum_exp(weight_sum, peak):
    """Return the natural log-sum-exp of the scores of each query row, or -inf for rows that saw no key.

    `weight_sum` and `peak` are the rows' online-softmax state: the sum of weights, and the largest score in base 2.
    """
    return (peak + tl.log2(weight_sum)) / LOG2_E
