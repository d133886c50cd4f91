"""The op `sample`, in three kernels over rows of logits.

`choose_largest` finds the largest logit of each row; greedy rows take it. For the other rows, `find_threshold` finds
the smallest logit that top-k and top-p keep and the range that typical-p keeps, and `draw` takes the largest kept logit
after adding Gumbel noise. The gap of a token is the row's largest logit minus its own; its depth is the gap divided by
the temperature.

The kernels read logits in the dtype of the model and compare them in float32. `choose_largest` reads a row first, so it
applies penalties, bans and edits, and writes the changed row to `penalized` for the other two kernels.

`find_threshold` searches only the groups of tokens with a logit above a bound, in a list (see groups.py). The bound is

- for top-k: the k-th largest of the groups' largest logits;
- for top-p with min-p: the logit below which min-p drops tokens;
- for top-p alone: the largest logits of groups that together have enough mass. If the mass is spread over thousands of
  tokens, these do not have enough, and the kernel searches the whole row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.sampling.groups import (
    GROUP,
    INFINITE,
    NOWHERE,
    bounding_gap,
    list_groups,
    listed_tokens,
    quarters_short,
)
from ingot.backends.triton.kernels.sampling.kept_tokens import kept_tokens, logits_of, typical_range, weight_of
from ingot.backends.triton.kernels.sampling.penalties import has_penalties, penalize


@triton.jit
def best_of_row(peak, place, peaks, places, arrived, row, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Merge the largest values that the SPLITS programs of one row have found.

    Return (whether this program is the last to arrive, largest value, its token id). `peak` and `place` are the value
    and the id that this program found. The last program returns the largest value of all programs, with the lowest id
    among equal values. The other programs return `peak` and `place`. `peaks` and `places` are scratch, and `arrived`
    counts the programs.
    """
    split = tl.program_id(0)
    tl.store(peaks + row * SPLITS + split, peak)
    tl.store(places + row * SPLITS + split, place)
    tl.debug_barrier()
    # Release the stores above, acquire those of the other programs: the last one sees all.
    last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(arrived + row, 0)
        others = tl.arange(0, BLOCK_SPLITS)
        mask = others < SPLITS
        # Read from the L2 cache: the L1 cache of this multiprocessor may hold older contents.
        value = tl.load(peaks + row * SPLITS + others, mask=mask, other=float("-inf"), cache_modifier=".cg")
        where = tl.load(places + row * SPLITS + others, mask=mask, other=NOWHERE, cache_modifier=".cg")
        peak = tl.max(value)
        place = tl.min(tl.where(value == peak, where, NOWHERE))
    return last, peak, place


@triton.jit
def choose_largest(
    logits,
    temperature,
    token_counts,
    count_rows,
    repetition,
    frequency,
    presence,
    banned,
    edits,
    edit_rows,
    last_token,
    changed,
    penalized,
    tokens,
    tops,
    masses,
    group_tops,
    split_masses,
    peaks,
    places,
    arrived,
    VOCAB: tl.constexpr,
    LOGITS_ROW: tl.constexpr,
    COUNTS_ROW: tl.constexpr,
    GENERATED: tl.constexpr,
    MOST_BANNED: tl.constexpr,
    BLOCK_BANNED: tl.constexpr,
    EDITS_ROW: tl.constexpr,
    ALLOWED: tl.constexpr,
    BIASES: tl.constexpr,
    PAIRS: tl.constexpr,
    ANY_TOKEN: tl.constexpr,
    BLOCK_PENALIZED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find the largest logit of each row. A program takes BLOCK logits of one row.

    Results per row:

    - `tokens`: the id of the largest logit, the lowest among equals; -1 if that logit is infinite, or any is NaN
    - `tops`: the largest logit, or infinity if the id is -1
    - `group_tops`, if the row has a temperature: the largest logit of each group of GROUP adjacent token ids
    - `masses`, if the row has a temperature: the sum over tokens of exp((logit - largest logit) / temperature)
    - `changed`: 1 if the row has penalties, bans or edits, else 0
    - `penalized`, if `changed` is 1: the changed logits. All other results are computed from them

    `split_masses`, `peaks`, `places` and `arrived` are scratch.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row)
    asked = has_penalties(count_rows, banned, edit_rows, row, MOST_BANNED, BLOCK_BANNED)
    if DEPENDENT:
        gdc_wait()
    split = tl.program_id(0)
    column = split * BLOCK + tl.arange(0, BLOCK)
    given, left = logits + row * LOGITS_ROW, penalized + row * VOCAB
    if asked:
        penalize(
            given,
            left,
            split * BLOCK,
            row,
            token_counts,
            count_rows,
            repetition,
            frequency,
            presence,
            banned,
            edits,
            edit_rows,
            last_token,
            VOCAB,
            COUNTS_ROW,
            GENERATED,
            MOST_BANNED,
            BLOCK_BANNED,
            EDITS_ROW,
            ALLOWED,
            BIASES,
            PAIRS,
            ANY_TOKEN,
            BLOCK,
            BLOCK_PENALIZED,
        )
        value = tl.load(left + column, mask=column < VOCAB, other=float("-inf"))
    else:
        value = tl.load(given + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)  # a NaN spoils its row as +inf does
    peak = tl.max(value)
    place = tl.min(tl.where(value == peak, column, NOWHERE))
    if heat > 0:
        in_split: tl.constexpr = BLOCK // GROUP
        group = split * in_split + tl.arange(0, in_split)
        tl.store(group_tops + row * SPLITS * in_split + group, tl.max(tl.reshape(value, (in_split, GROUP)), 1))
        weight = tl.where(value > float("-inf"), weight_of(peak - value, heat, 0.0), 0.0)
        tl.store(split_masses + row * SPLITS + split, tl.sum(weight))
    last, top, place = best_of_row(peak, place, peaks, places, arrived, row, SPLITS, BLOCK_SPLITS)
    if last:
        finite = tl.abs(top) < float("inf")
        tl.store(tokens + row, tl.where(finite, place, -1))
        tl.store(tops + row, tl.where(finite, top, float("inf")))
        tl.store(changed + row, asked.to(tl.int32))
        if (heat > 0) & finite:
            others = tl.arange(0, BLOCK_SPLITS)
            mask = others < SPLITS
            gap = top - tl.load(peaks + row * SPLITS + others, mask=mask, other=float("-inf"), cache_modifier=".cg")
            mass = tl.load(split_masses + row * SPLITS + others, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(masses + row, tl.sum(mass * weight_of(gap, heat, 0.0)))


@triton.jit
def narrow(
    source,
    listed,
    count,
    top,
    temperature,
    target,
    low,
    size,
    END: tl.constexpr,
    BY_MASS: tl.constexpr,
    GROUPS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Narrow the range in which `least_listed_gap` searches the smallest gap that covers a weight of `target`.

    Return the new (low, size). The range begins at `low` and has `size` values. They are float32 gaps, with their bits
    read as integers. Each iteration narrows the range to a quarter, until it has at most END values.

    A token's gap is the row's largest logit `top` minus its logit. A gap covers the listed tokens with that gap or a
    smaller one. With BY_MASS, a token's weight is its probability relative to the most likely token, else 1. `listed`
    are `count` groups of adjacent token ids.
    """
    while size > END:
        step = (size + 3) // 4
        first = tl.zeros((BLOCK_GROUPS, GROUP), tl.float32)
        second = tl.zeros((BLOCK_GROUPS, GROUP), tl.float32)
        third = tl.zeros((BLOCK_GROUPS, GROUP), tl.float32)
        for start in range(0, count, BLOCK_GROUPS):
            column = listed_tokens(listed, start, count, GROUPS, VOCAB, BLOCK_GROUPS)
            value = logits_of(source, column, column != NOWHERE)
            gap = top - value
            offset = gap.to(tl.int32, bitcast=True) - low
            weight = 1.0
            if BY_MASS:
                weight = weight_of(gap, temperature, 0.0)
            first += tl.where(offset < step, weight, 0.0)
            second += tl.where(offset < 2 * step, weight, 0.0)
            third += tl.where(offset < 3 * step, weight, 0.0)
        low += quarters_short(tl.sum(first), tl.sum(second), tl.sum(third), target) * step
        size = step
    return low, size


@triton.jit
def least_listed_gap(
    source,
    listed,
    count,
    top,
    temperature,
    target,
    BY_MASS: tl.constexpr,
    GROUPS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Return the smallest gap that covers tokens with a weight of at least `target` together.

    A token's gap is the row's largest logit `top` minus its logit. A gap covers the listed tokens with that gap or a
    smaller one. With BY_MASS, a token's weight is its probability relative to the most likely token, else 1. `listed`
    are `count` groups of adjacent token ids. The result is infinity if all listed tokens together weigh less.

    The search ends early if the range has only one gap of a token left. With logits rounded to bfloat16 that always
    happens.
    """
    low, size = tl.full((), 0, tl.int32), tl.full((), INFINITE + 1, tl.int32)
    low, size = narrow(
        source, listed, count, top, temperature, target, low, size, 1 << 15, BY_MASS, GROUPS, VOCAB, BLOCK_GROUPS
    )
    least = tl.full((BLOCK_GROUPS, GROUP), NOWHERE, tl.int32)
    most = tl.full((BLOCK_GROUPS, GROUP), -1, tl.int32)
    for start in range(0, count, BLOCK_GROUPS):
        column = listed_tokens(listed, start, count, GROUPS, VOCAB, BLOCK_GROUPS)
        value = logits_of(source, column, column != NOWHERE)
        bits = (top - value).to(tl.int32, bitcast=True)
        least = tl.minimum(least, tl.where(bits >= low, bits, NOWHERE))
        most = tl.maximum(most, tl.where(bits - low < size, bits, -1))
    only = tl.min(least)
    if only == tl.max(most):
        low, size = only, 1
    low, size = narrow(
        source, listed, count, top, temperature, target, low, size, 1, BY_MASS, GROUPS, VOCAB, BLOCK_GROUPS
    )
    return tl.minimum(low, INFINITE).to(tl.float32, bitcast=True)


@triton.jit
def listed_mass(
    source,
    listed,
    count,
    top,
    temperature,
    min_p,
    limit,
    GROUPS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Sum the weights of listed tokens up to a depth: return (sum for depth <= `limit`, sum for depth < `limit`).

    A token's depth is (largest logit `top` - its logit) / temperature. Its weight is exp(-depth), or 0 if that is below
    min_p. `listed` are `count` groups of adjacent token ids.
    """
    up_to = tl.zeros((BLOCK_GROUPS, GROUP), tl.float32)
    below = tl.zeros((BLOCK_GROUPS, GROUP), tl.float32)
    for start in range(0, count, BLOCK_GROUPS):
        column = listed_tokens(listed, start, count, GROUPS, VOCAB, BLOCK_GROUPS)
        value = logits_of(source, column, column != NOWHERE)
        gap = top - value
        weight, depth = weight_of(gap, temperature, min_p), tl.div_rn(gap, temperature)
        up_to += tl.where(depth <= limit, weight, 0.0)
        below += tl.where(depth < limit, weight, 0.0)
    return tl.sum(up_to), tl.sum(below)


@triton.jit
def find_threshold(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    typical_p,
    changed,
    penalized,
    tops,
    masses,
    group_tops,
    listed_groups,
    limits,
    last_ids,
    centres,
    spreads,
    VOCAB: tl.constexpr,
    LOGITS_ROW: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find which tokens top-k, top-p and typical-p keep, for each row with a temperature. A program takes one row.

    A token's depth is (largest logit - its logit) / temperature. A row keeps the tokens with a depth below its limit.
    Of the tokens at exactly the limit, it keeps those with an id up to its last id. Of all these, it keeps those with a
    depth within `spreads` of `centres` (`typical_range`). The outputs are `limits`, `last_ids`, `centres` and
    `spreads`. `tops`, `masses`, `group_tops`, `changed` and `penalized` come from `choose_largest`. `listed_groups` is
    scratch.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if DEPENDENT:
        gdc_wait()
    if (heat > 0) == 0:
        return
    top, asked = tl.load(tops + row), tl.load(changed + row) > 0
    if top < float("inf"):
        limit, last_id = float("inf"), NOWHERE
        by_number = (most > 0) & (most < VOCAB)
        source = (logits + row * LOGITS_ROW, penalized + row * VOCAB, asked)
        if by_number | (share < 1):
            listed = listed_groups + row * GROUPS
            group = tl.arange(0, BLOCK_ALL)
            group_top = tl.load(group_tops + row * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
            group_gap = top - group_top
            all_mass = tl.load(masses + row)
            if by_number:
                bound = bounding_gap(group_gap, tl.full((BLOCK_ALL,), 1.0, tl.float32), most.to(tl.float32))
            elif least > 0:
                # A little more than the bound of min-p: min-p itself is tested by weights, which are rounded.
                bound = tl.maximum(heat * (1e-3 - 1.001 * tl.log(least)), 0.0)
            else:
                bound = bounding_gap(group_gap, weight_of(group_gap, heat, 0.0), all_mass * share)
            count = list_groups(listed, (group_gap <= bound) & (group < GROUPS))
            if by_number:
                wanted = most.to(tl.float32)
                edge = least_listed_gap(source, listed, count, top, heat, wanted, False, GROUPS, VOCAB, BLOCK_GROUPS)
                limit = tl.div_rn(tl.minimum(edge, bound), heat)
            if share < 1:
                target = all_mass * share
                if by_number | (least > 0):
                    kept, _ = listed_mass(source, listed, count, top, heat, least, limit, GROUPS, VOCAB, BLOCK_GROUPS)
                    target = kept * share
                edge = least_listed_gap(source, listed, count, top, heat, target, True, GROUPS, VOCAB, BLOCK_GROUPS)
                edge = tl.minimum(edge, bound)  # sums in another order may fall short by a rounding
                limit = tl.minimum(limit, tl.div_rn(edge, heat))
                _, before = listed_mass(source, listed, count, top, heat, 0.0, limit, GROUPS, VOCAB, BLOCK_GROUPS)
                # Of equal tokens at the edge, keep as many as reach the target; at least one.
                room = tl.ceil((target - before) / weight_of(edge, heat, 0.0))
                room = tl.minimum(tl.maximum(room, 1.0), VOCAB).to(tl.int32)
                seen = 0
                for start in range(0, count, BLOCK_GROUPS):
                    column = listed_tokens(listed, start, count, GROUPS, VOCAB, BLOCK_GROUPS)
                    value = logits_of(source, column, column != NOWHERE)
                    equal = (tl.div_rn(top - value, heat) == limit) & (value > float("-inf"))
                    equal = tl.reshape(equal.to(tl.int32), (BLOCK_GROUPS * GROUP,))
                    rank = seen + tl.cumsum(equal, 0)
                    ids = tl.reshape(column, (BLOCK_GROUPS * GROUP,))
                    last_id = tl.minimum(last_id, tl.min(tl.where((equal > 0) & (rank == room), ids, NOWHERE)))
                    seen += tl.sum(equal)
        tl.store(limits + row, limit)
        tl.store(last_ids + row, last_id)
        typical = tl.load(typical_p + row)
        centre, spread = 0.0, float("inf")
        if typical < 1:
            centre, spread = typical_range(source, top, heat, least, limit, last_id, typical, VOCAB, BLOCK)
        tl.store(centres + row, centre)
        tl.store(spreads + row, spread)


@triton.jit
def gumbel(seed, position, start, BLOCK: tl.constexpr):
    """Return Gumbel noise for the BLOCK token ids from `start` on. `start` is a multiple of 4.

    The noise is `-log(-log(u))`. The random number u depends on seed, position and id
    (`ingot.ir.ops.sampling.uniform`).
    """
    counter = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    none = counter * 0
    low = none + (seed & 0xFFFFFFFF).to(tl.uint32)
    high = none + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox_impl(counter, none + position.to(tl.uint32), none, none, low, high)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    # 23 bits: they fit a signed integer, and their conversion to float32 is exact.
    uniform = ((words >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def draw(
    logits,
    temperature,
    min_p,
    seeds,
    positions,
    changed,
    penalized,
    tops,
    limits,
    last_ids,
    centres,
    spreads,
    tokens,
    peaks,
    places,
    arrived,
    VOCAB: tl.constexpr,
    LOGITS_ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Draw the token of each row with a temperature, among the kept tokens (Gumbel-max).

    The drawn token has the largest sum of logit / temperature and Gumbel noise. A program takes SHARE logits of one
    row. Greedy rows keep their token from `choose_largest` in `tokens`. `limits`, `last_ids`, `centres` and `spreads`
    come from `find_threshold`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    heat, least, seed = tl.load(temperature + row), tl.load(min_p + row), tl.load(seeds + row)
    if DEPENDENT:
        gdc_wait()
    if (heat > 0) == 0:
        return
    top, asked = tl.load(tops + row), tl.load(changed + row) > 0
    if top < float("inf"):
        limit, last_id, position = tl.load(limits + row), tl.load(last_ids + row), tl.load(positions + row)
        centre, spread = tl.load(centres + row), tl.load(spreads + row)
        source = (logits + row * LOGITS_ROW, penalized + row * VOCAB, asked)
        peak, place = tl.full((), float("-inf"), tl.float32), tl.full((), NOWHERE, tl.int32)
        first = tl.program_id(0) * SHARE
        for start in range(first, first + SHARE, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = logits_of(source, column, column < VOCAB)
            gap = top - value
            depth = tl.div_rn(gap, heat)
            keep = kept_tokens(gap, depth, column, heat, least, limit, last_id) & (tl.abs(depth - centre) <= spread)
            if tl.max(keep.to(tl.int32)) > 0:
                noisy = tl.where(keep, gumbel(seed, position, start, BLOCK) - depth, float("-inf"))
                highest = tl.max(noisy)
                if highest > peak:  # among equals, keep the first
                    peak = highest
                    place = tl.min(tl.where(keep & (noisy == highest), column, NOWHERE))
        last, peak, place = best_of_row(peak, place, peaks, places, arrived, row, SPLITS, BLOCK_SPLITS)
        if last:
            tl.store(tokens + row, place)
