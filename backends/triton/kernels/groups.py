"""Find a row's largest logits without reading the whole row several times.

One pass stores the largest logit of each GROUP of tokens. The k-th largest of these is a lower bound of the row's k
largest logits. Only groups with a token at or above the bound, about k of them, are listed and read again.

The gap of a logit is the row's largest logit minus it. Gaps are never negative, so their bits, compared as integers,
have the same order.
"""

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(32)  # tokens per stored largest logit: a cache line of float32
NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # after all ids
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # the bits of infinity


@triton.jit
def quarters_short(first, second, third, target):
    """Return how many of the three sums, which ascend, are below `target`: 0 to 3."""
    return (first < target).to(tl.int32) + (second < target).to(tl.int32) + (third < target).to(tl.int32)


@triton.jit
def bounding_gap(gap, weight, target):
    """Return a bound: the elements of `gap` up to it have weights that sum to at least `target`.

    `gap` holds distances below the row's largest logit, `weight` the weight of each. The bound is close to the least
    possible one, and infinity if all weights sum to less. Each iteration narrows the range of its bits to a quarter. It
    stops at the exponent and 6 bits of the mantissa, which is enough for a bound.
    """
    bits = gap.to(tl.int32, bitcast=True)
    low, size = 0, INFINITE + 1
    while size > 1 << 17:
        step = (size + 3) // 4
        first = tl.sum(tl.where(bits - low < step, weight, 0.0))
        second = tl.sum(tl.where(bits - low < 2 * step, weight, 0.0))
        third = tl.sum(tl.where(bits - low < 3 * step, weight, 0.0))
        low += quarters_short(first, second, third, target) * step
        size = step
    return tl.minimum(low + size - 1, INFINITE).to(tl.float32, bitcast=True)


@triton.jit
def list_groups(listed, near):
    """Write the indices of the groups for which the bool vector `near` is true to `listed`, and return their number.

    They are in ascending order.
    """
    group = tl.arange(0, near.shape[0])
    tl.store(listed + tl.cumsum(near.to(tl.int32), 0) - 1, group, mask=near)
    tl.debug_barrier()  # other threads of the block read what this one listed
    return tl.sum(near.to(tl.int32))


@triton.jit
def listed_tokens(listed, start, count, GROUPS: tl.constexpr, VOCAB: tl.constexpr, BLOCK_GROUPS: tl.constexpr):
    """Return the token ids [BLOCK_GROUPS, GROUP] of groups in the list `listed`, from list index `start` on.

    The list has `count` groups. Ids after its end or after the vocabulary are NOWHERE. If it has all GROUPS, it is not
    read.
    """
    place = start + tl.arange(0, BLOCK_GROUPS)
    group = tl.load(listed + place, mask=(place < count) & (count < GROUPS), other=0)
    group = tl.where(count < GROUPS, group, place)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.where((place < count)[:, None] & (column < VOCAB), column, NOWHERE)
