"""Finding a row's largest logits without going over it again and again.

The largest logit of each GROUP of tokens is remembered. The k-th largest of these bounds the k largest logits: only
groups with a token above the bound are listed and gone through, which are about k.

A gap says how far a logit lies below its row's largest. Gaps are never negative, so that their bits, as integers, have
their order.
"""

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(32)  # tokens whose largest logit is remembered: a cache line
NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # behind all ids
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # the bits of infinity


@triton.jit
def quarters_short(first, second, third, target):
    """How many of these growing sums fall short of the target."""
    return (first < target).to(tl.int32) + (second < target).to(tl.int32) + (third < target).to(tl.int32)


@triton.jit
def bounding_gap(gap, weight, target):
    """A gap such that those of its size and less weigh at least `target` together, and hardly more than it takes;
    infinity when all of them do not. It is searched by its bits, a quarter of the range at a time, down to steps of an
    exponent and 6 bits: bounding needs no more."""
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
    """Leave in `listed` the groups that are `near`, in order; gives their number."""
    group = tl.arange(0, near.shape[0])
    tl.store(listed + tl.cumsum(near.to(tl.int32), 0) - 1, group, mask=near)
    tl.debug_barrier()  # what one thread of the block listed, others read
    return tl.sum(near.to(tl.int32))


@triton.jit
def listed_tokens(listed, start, count, GROUPS: tl.constexpr, VOCAB: tl.constexpr, BLOCK_GROUPS: tl.constexpr):
    """Ids [BLOCK_GROUPS, GROUP] of the tokens of listed groups from `start` on, NOWHERE behind the list's end and the
    vocabulary's. A list of all GROUPS is not read."""
    place = start + tl.arange(0, BLOCK_GROUPS)
    group = tl.load(listed + place, mask=(place < count) & (count < GROUPS), other=0)
    group = tl.where(count < GROUPS, group, place)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.where((place < count)[:, None] & (column < VOCAB), column, NOWHERE)
