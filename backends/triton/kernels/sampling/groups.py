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
    """Return how many of three ascending sums are below `target`: 0 to 3. A search then continues in that quarter."""
    return (first < target).to(tl.int32) + (second < target).to(tl.int32) + (third < target).to(tl.int32)


@triton.jit
def bounding_gap(gap, weight, target):
    """Return a gap that covers elements with a weight of at least `target` together.

    `gap` [n] holds each element's distance below the row's largest logit, and `weight` [n] its weight. A gap covers the
    elements with that gap or a smaller one. The result is close to the smallest such gap. It is infinity if all
    elements together weigh less.

    Each iteration of the search narrows the range of the gap to a quarter. The search stops at the exponent and 6 bits
    of the mantissa.
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
    """Write the indices of the true elements of `near` to `listed`, in ascending order. Return their number.

    Each element of the bool vector `near` stands for a group of adjacent token ids.
    """
    group = tl.arange(0, near.shape[0])
    tl.store(listed + tl.cumsum(near.to(tl.int32), 0) - 1, group, mask=near)
    tl.debug_barrier()  # other threads of the block read what this one listed
    return tl.sum(near.to(tl.int32))


@triton.jit
def listed_tokens(listed, start, count, GROUPS: tl.constexpr, VOCAB: tl.constexpr, BLOCK_GROUPS: tl.constexpr):
    """Return the token ids [BLOCK_GROUPS, GROUP] of BLOCK_GROUPS groups of a list, from index `start` on.

    A group is GROUP adjacent token ids. `listed` holds the numbers of `count` groups; it is not read if `count` is
    GROUPS (all groups). Ids past the end of the list or of the vocabulary are NOWHERE.
    """
    place = start + tl.arange(0, BLOCK_GROUPS)
    group = tl.load(listed + place, mask=(place < count) & (count < GROUPS), other=0)
    group = tl.where(count < GROUPS, group, place)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.where((place < count)[:, None] & (column < VOCAB), column, NOWHERE)
