"""Kernels of the routers of mixtures of experts, `route` and `sparse_mixer`: a program takes the logits of one token.

Experts are compared by integers with the order of their scores (`order_of`), so equal scores are equal numbers, and a
NaN is greater than all others, as in a sort of torch. Every index is therefore one of an expert, whatever the logits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.order import LEAST, order_of

# Columns without an expert, and experts that are already chosen.
TAKEN: tl.constexpr = LEAST
NO_INDEX: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # after all indices


@triton.jit
def first_of(order, index):
    """Return the lowest `index` of the greatest numbers of `order`. Both are tiles [groups, experts of a group]."""
    greatest = tl.max(tl.max(order, 1), 0)
    return tl.min(tl.min(tl.where(order == greatest, index, NO_INDEX), 1), 0)


@triton.jit
def picked(value, mask):
    """Return the number of a tile [groups, experts of a group] at the only place where `mask` is true."""
    return tl.sum(tl.sum(tl.where(mask, value, 0.0), 1), 0)


@triton.jit
def _open_groups(
    by,
    order,
    index,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Return whether each group is open to the choice, [BLOCK_GROUPS]: the KEPT groups with the greatest scores are.

    A group's score is the sum of its BEST best scores. `by` holds the scores [BLOCK_GROUPS, experts of a group], and
    `order` their order, with TAKEN where there is no expert.
    """
    total = tl.zeros((BLOCK_GROUPS,), tl.float32)
    left = order
    for _ in range(BEST):
        greatest = tl.max(left, 1)
        place = tl.min(tl.where(left == greatest[:, None], index, NO_INDEX), 1)
        mine = index == place[:, None]
        total += tl.sum(tl.where(mine, by, 0.0), 1)
        left = tl.where(mine, TAKEN, left)
    group = tl.arange(0, BLOCK_GROUPS)
    closed = tl.where(group < GROUPS, order_of(total), TAKEN)
    opened = group < 0
    for _ in range(KEPT):
        greatest = tl.max(closed, 0)
        place = tl.min(tl.where(closed == greatest, group, NO_INDEX), 0)
        opened = opened | (group == place)
        closed = tl.where(group == place, TAKEN, closed)
    return opened


@triton.jit
def route(
    logits,
    bias,
    weights,
    chosen,
    LOGITS_ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    SCALE: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Choose TOP_K experts for each row of `logits` f32[rows, GROUPS * SIZE], as the op `route` defines it.

    Grid: rows. Writes `weights` f32[rows, TOP_K] and `chosen` i32[rows, TOP_K]. `bias` f32[GROUPS * SIZE] may be None.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_SIZE)
    index = group[:, None] * SIZE + place[None, :]
    expert = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    if bias is not None:
        added = tl.load(bias + index, mask=expert, other=0.0)
    if DEPENDENT:
        gdc_wait()
    logit = tl.load(logits + row * LOGITS_ROW + index, mask=expert, other=float("-inf"))
    if SIGMOID:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    else:
        power = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = tl.div_rn(power, tl.sum(tl.sum(power, 1), 0))
    by = score
    if BY_LOGITS:
        by = logit
    if bias is not None:
        by += added
    order = tl.where(expert, order_of(by), TAKEN)
    if GROUPS > 1:
        opened = _open_groups(by, order, index, GROUPS, KEPT, BEST, BLOCK_GROUPS)
        order = tl.where(expert & (opened == 0)[:, None], order_of(tl.full(by.shape, float("-inf"), tl.float32)), order)
    nth = tl.arange(0, BLOCK_CHOICES)
    weight = tl.zeros((BLOCK_CHOICES,), tl.float32)
    choice = tl.zeros((BLOCK_CHOICES,), tl.int32)
    for number in range(TOP_K):
        best = first_of(order, index)
        mine = expert & (index == best)
        weight = tl.where(nth == number, picked(score, mine), weight)
        choice = tl.where(nth == number, best, choice)
        order = tl.where(mine, TAKEN, order)
    if RENORMALIZE:
        total = tl.sum(weight, 0)
        weight = tl.div_rn(weight, tl.where(total < LEAST_SUM, LEAST_SUM, total))
    tl.store(weights + row * TOP_K + nth, weight * SCALE, mask=nth < TOP_K)
    tl.store(chosen + row * TOP_K + nth, choice, mask=nth < TOP_K)


@triton.jit
def sparse_mixer(
    logits,
    weights,
    chosen,
    LOGITS_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Choose two experts for each row of `logits` f32[rows, EXPERTS], as the op `sparse_mixer` defines it.

    Grid: rows. Writes `weights` f32[rows, 2] and `chosen` i32[rows, 2]. FAR is twice the op's `jitter`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)[None, :]
    expert = index < EXPERTS
    logit = tl.load(logits + row * LOGITS_ROW + index, mask=expert, other=float("-inf"))
    order = tl.where(expert, order_of(logit), TAKEN)
    left = expert
    for number in tl.static_range(2):
        best = first_of(order, index)
        mine = index == best
        most = picked(logit, mine)
        size = tl.abs(logit)
        size = tl.where(most > size, most, size)
        # Columns without an expert have the logit -inf, and are not divided.
        far = tl.where(expert, tl.div_rn(most - logit, tl.where(expert, size, 1.0)), 0.0) > FAR
        near = tl.where(left & (far == 0), logit, float("-inf"))
        power = tl.exp(near - tl.max(tl.max(near, 1), 0))
        tl.store(weights + row * 2 + number, tl.div_rn(picked(power, mine), tl.sum(tl.sum(power, 1), 0)))
        tl.store(chosen + row * 2 + number, best)
        left = left & (mine == 0)
        order = tl.where(mine, TAKEN, order)
