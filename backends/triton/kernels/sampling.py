"""The op `sample`, in three kernels over rows of logits.

`choose_largest` finds the largest logit of each row, which greedy rows take. For the others `find_threshold` finds how
far down top-k and top-p keep tokens, and `draw` takes the largest of the kept ones after noise. Logits are handled as
depths: how far a scaled logit lies below its row's largest. Depths are not negative, so that their bits, as integers,
have their order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # behind all ids
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # the bits of infinity


@triton.jit
def best_of_row(peak, place, peaks, places, arrived, row, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Leave this program's largest value and its place. (is last, value, place) of the row's largest, lowest place
    first among equals: the last program of a row to arrive has those of all SPLITS programs."""
    split = tl.program_id(0)
    tl.store(peaks + row * SPLITS + split, peak)
    tl.store(places + row * SPLITS + split, place)
    tl.debug_barrier()
    # Release what is stored above, acquire what the others stored: the last one sees all.
    last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(arrived + row, 0)
        others = tl.arange(0, BLOCK_SPLITS)
        mask = others < SPLITS
        # From the L2 cache: the L1 cache of this multiprocessor may hold what stood there before.
        value = tl.load(peaks + row * SPLITS + others, mask=mask, other=float("-inf"), cache_modifier=".cg")
        where = tl.load(places + row * SPLITS + others, mask=mask, other=NOWHERE, cache_modifier=".cg")
        peak = tl.max(value)
        place = tl.min(tl.where(value == peak, where, NOWHERE))
    return last, peak, place


@triton.jit
def choose_largest(
    logits,
    tokens,
    tops,
    peaks,
    places,
    arrived,
    VOCAB: tl.constexpr,
    LOGITS_ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The id of the largest logit of each row, the lowest among equals, or -1; in `tops` the logit itself, or infinity
    where the id is -1. A program takes BLOCK logits of one row."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * LOGITS_ROW + column, mask=column < VOCAB, other=float("-inf"))
    value = tl.where(value != value, float("inf"), value)  # a NaN spoils its row as +inf does
    peak = tl.max(value)
    place = tl.min(tl.where(value == peak, column, NOWHERE))
    last, peak, place = best_of_row(peak, place, peaks, places, arrived, row, SPLITS, BLOCK_SPLITS)
    if last:
        finite = tl.abs(peak) < float("inf")
        tl.store(tokens + row, tl.where(finite, place, -1))
        tl.store(tops + row, tl.where(finite, peak, float("inf")))


@triton.jit
def gaps_from(row_logits, start, top, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How far BLOCK logits from `start` on lie below the largest, `top`; infinity behind the row's end."""
    column = start + tl.arange(0, BLOCK)
    value = tl.load(row_logits + column, mask=column < VOCAB, other=float("-inf"))
    return column, top - value


@triton.jit
def weight_of(gap, temperature, min_p):
    """exp(-gap / temperature), a token's probability over that of the likeliest; 0 where min-p drops the token."""
    weight = tl.exp(gap * (-1.0 / temperature))
    return tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def find_gap(row_logits, top, temperature, target, BY_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The least gap such that the tokens of this gap and less weigh at least `target` together: BY_MASS by
    exp(-gap / temperature), else by their number. Gaps are searched by their bits, a quarter of the range at a time."""
    low, size = 0, INFINITE + 1
    while size > 1:
        step = (size + 3) // 4
        first = tl.zeros((BLOCK,), tl.float32)
        second = tl.zeros((BLOCK,), tl.float32)
        third = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            column, gap = gaps_from(row_logits, start, top, VOCAB, BLOCK)
            bits = gap.to(tl.int32, bitcast=True) - low
            if BY_MASS:
                weight = weight_of(gap, temperature, 0.0)
            else:
                weight = tl.where(column < VOCAB, 1.0, 0.0)
            first += tl.where(bits < step, weight, 0.0)
            second += tl.where(bits < 2 * step, weight, 0.0)
            third += tl.where(bits < 3 * step, weight, 0.0)
        short = (tl.sum(first) < target).to(tl.int32)
        short += (tl.sum(second) < target).to(tl.int32)
        short += (tl.sum(third) < target).to(tl.int32)
        low += short * step
        size = step
    return tl.cast(low, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def find_threshold(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    tops,
    limits,
    last_ids,
    VOCAB: tl.constexpr,
    LOGITS_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """What top-k and top-p keep of each row that is drawn: tokens of less depth than its limit, and those of the very
    limit up to its last id. A program takes one row, and goes over it again and again."""
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if DEPENDENT:
        gdc_wait()
    top = tl.load(tops + row)
    if (heat > 0) & (top < float("inf")):
        row_logits = logits + row * LOGITS_ROW
        limit, last_id = float("inf"), NOWHERE
        if (most > 0) & (most < VOCAB):
            gap = find_gap(row_logits, top, heat, most.to(tl.float32), False, VOCAB, BLOCK)
            limit = tl.div_rn(gap, heat)
        if share < 1:
            mass = tl.zeros((BLOCK,), tl.float32)
            for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
                column, gap = gaps_from(row_logits, start, top, VOCAB, BLOCK)
                mass += tl.where(tl.div_rn(gap, heat) <= limit, weight_of(gap, heat, least), 0.0)
            target = tl.sum(mass) * share
            edge = find_gap(row_logits, top, heat, target, True, VOCAB, BLOCK)
            limit = tl.div_rn(edge, heat)
            mass = tl.zeros((BLOCK,), tl.float32)
            for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
                column, gap = gaps_from(row_logits, start, top, VOCAB, BLOCK)
                mass += tl.where(tl.div_rn(gap, heat) < limit, weight_of(gap, heat, 0.0), 0.0)
            # Of equals at the edge, as many as it takes to fill the target; at least one.
            room = tl.ceil((target - tl.sum(mass)) / weight_of(edge, heat, 0.0))
            room = tl.minimum(tl.maximum(room, 1.0), VOCAB).to(tl.int32)
            seen = 0
            for start in range(0, VOCAB, BLOCK):
                column, gap = gaps_from(row_logits, start, top, VOCAB, BLOCK)
                equal = ((tl.div_rn(gap, heat) == limit) & (column < VOCAB)).to(tl.int32)
                rank = seen + tl.cumsum(equal, 0)
                last_id = tl.minimum(last_id, tl.min(tl.where((equal > 0) & (rank == room), column, NOWHERE)))
                seen += tl.sum(equal)
        tl.store(limits + row, limit)
        tl.store(last_ids + row, last_id)


@triton.jit
def gumbel(seed, position, start, BLOCK: tl.constexpr):
    """Noise of BLOCK tokens from `start`, a multiple of 4, on: `-log(-log(u))` of `ingot.ir.ops.sampling.uniform`."""
    counter = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    none = counter * 0
    low = none + (seed & 0xFFFFFFFF).to(tl.uint32)
    high = none + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox_impl(counter, none + position.to(tl.uint32), none, none, low, high)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    # 23 bits: a signed integer holds them, and their conversion is exact.
    uniform = ((words >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def draw(
    logits,
    temperature,
    min_p,
    seeds,
    positions,
    tops,
    limits,
    last_ids,
    tokens,
    peaks,
    places,
    arrived,
    VOCAB: tl.constexpr,
    LOGITS_ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The token of each row that is drawn: the largest of the kept logits with noise. A program takes BLOCK logits of
    one row; rows that are not drawn keep their tokens."""
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    heat, least, seed = tl.load(temperature + row), tl.load(min_p + row), tl.load(seeds + row)
    if DEPENDENT:
        gdc_wait()
    top = tl.load(tops + row)
    if (heat > 0) & (top < float("inf")):
        start = tl.program_id(0) * BLOCK
        column, gap = gaps_from(logits + row * LOGITS_ROW, start, top, VOCAB, BLOCK)
        limit, depth = tl.load(limits + row), tl.div_rn(gap, heat)
        keep = (depth < limit) | ((depth == limit) & (column <= tl.load(last_ids + row)))
        keep = keep & (depth < float("inf")) & ((depth == 0) | (weight_of(gap, heat, least) > 0))
        noisy = tl.where(keep, gumbel(seed, tl.load(positions + row), start, BLOCK) - depth, float("-inf"))
        peak = tl.max(noisy)
        place = tl.min(tl.where(keep & (noisy == peak), column, NOWHERE))
        last, peak, place = best_of_row(peak, place, peaks, places, arrived, row, SPLITS, BLOCK_SPLITS)
        if last:
            tl.store(tokens + row, place)
