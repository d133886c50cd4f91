"""Which tokens of a row of logits sampling keeps: by min-p, top-k and top-p, and by typical sampling.

The gap of a token is the row's largest logit minus its own; its depth is the gap divided by the temperature.
"""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.sampling.groups import INFINITE, quarters_short


@triton.jit
def logits_of(source, column, mask):
    """Load a row's logits at the token ids `column`, in float32, with all changes applied; -inf outside `mask`.

    `source` is (pointer to the given row, pointer to the changed row, whether the row has penalties, bans or edits).
    """
    given, penalized, asked = source
    value = tl.load(given + column, mask=mask & (asked == 0), other=float("-inf")).to(tl.float32)
    return tl.where(asked, tl.load(penalized + column, mask=mask & asked, other=float("-inf")), value)


@triton.jit
def weight_of(gap, temperature, min_p):
    """Return exp(-gap / temperature), a token's probability relative to the most likely one; 0 if it is below min_p.

    `gap` is the row's largest logit minus the token's.
    """
    weight = tl.exp(gap * (-1.0 / temperature))
    return tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def kept_tokens(gap, depth, column, temperature, min_p, limit, last_id):
    """Return which of the token ids `column`, with gaps `gap` and depths `depth`, min-p, top-k and top-p keep.

    A token is kept if its depth is below `limit`, or equals it and the id is at most `last_id`, and if its probability
    is at least `min_p` times that of the most likely token.
    """
    keep = (depth < limit) | ((depth == limit) & (column <= last_id))
    return keep & (depth < float("inf")) & ((depth == 0) | (weight_of(gap, temperature, min_p) > 0))


@triton.jit
def weights_at(source, start, top, temperature, min_p, limit, last_id, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the depths and the weights of BLOCK tokens from the id `start` on; the weight of a dropped token is 0."""
    column = start + tl.arange(0, BLOCK)
    gap = top - logits_of(source, column, column < VOCAB)
    depth = tl.div_rn(gap, temperature)
    keep = kept_tokens(gap, depth, column, temperature, min_p, limit, last_id)
    return tl.where(keep, depth, 0.0), tl.where(keep, weight_of(gap, temperature, 0.0), 0.0)


@triton.jit
def typical_range(source, top, temperature, min_p, limit, last_id, typical_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return (centre, spread): typical sampling keeps the kept tokens whose depth is within `spread` of `centre`.

    The centre is the mean depth: it differs from the entropy as a token's depth differs from its negative
    log-probability. The spread is the least one whose tokens have `typical_p` of the probability. A search narrows its
    bits to a quarter per iteration, each a pass over the row.
    """
    masses, moments = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        depth, weight = weights_at(source, start, top, temperature, min_p, limit, last_id, VOCAB, BLOCK)
        masses += weight
        moments += weight * depth
    mass = tl.sum(masses)
    centre, target = tl.sum(moments) / mass, mass * typical_p
    low, size = tl.full((), 0, tl.int32), tl.full((), INFINITE + 1, tl.int32)
    while size > 1:
        step = (size + 3) // 4
        first, second, third = (
            tl.zeros((BLOCK,), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
        )
        for start in range(0, VOCAB, BLOCK):
            depth, weight = weights_at(source, start, top, temperature, min_p, limit, last_id, VOCAB, BLOCK)
            offset = tl.abs(depth - centre).to(tl.int32, bitcast=True) - low
            first += tl.where(offset < step, weight, 0.0)
            second += tl.where(offset < 2 * step, weight, 0.0)
            third += tl.where(offset < 3 * step, weight, 0.0)
        low += quarters_short(tl.sum(first), tl.sum(second), tl.sum(third), target) * step
        size = step
    return centre, tl.minimum(low, INFINITE).to(tl.float32, bitcast=True)
