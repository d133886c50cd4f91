"""The kernel of log-probabilities: those of sampled or given tokens, and of the most likely ones."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.sampling.groups import GROUP, NOWHERE, bounding_gap, list_groups, listed_tokens


@triton.jit
def top_logprobs(
    logits,
    sampled,
    targets,
    num_logprobs,
    ids,
    logprobs,
    ranks,
    group_tops,
    listed_groups,
    VOCAB: tl.constexpr,
    LOGITS_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `top_logprobs`: token ids, log-probabilities and ranks. A program takes one row of logits.

    Column 0 of a result row is for the token `targets`[row], or for `sampled`[row] if the target is below 0. The
    `num_logprobs`[row] most likely tokens follow. Unused columns hold the id -1 and the log-probability -inf. `ranks`
    receives the rank of column 0, from 1 on. If `num_logprobs`[row] is below 0, all columns are unused, and the rank is
    0. `group_tops` and `listed_groups` are scratch.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    count, target = tl.load(num_logprobs + row), tl.load(targets + row)
    if DEPENDENT:
        gdc_wait()
    entry = tl.arange(0, BLOCK_WIDTH)
    listed_id = tl.full((BLOCK_WIDTH,), -1, tl.int32)
    scores = tl.full((BLOCK_WIDTH,), float("-inf"), tl.float32)
    rank, chosen = 0, -1
    if count >= 0:
        chosen = tl.where(target >= 0, target, tl.load(sampled + row))
    if chosen >= 0:
        row_logits = logits + row * LOGITS_ROW
        own = tl.load(row_logits + chosen).to(tl.float32)
        tops, listed = group_tops + row * GROUPS, listed_groups + row * GROUPS
        better = tl.zeros((BLOCK_GROUPS, GROUP), tl.int32)
        highest_tops = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
        for start in range(0, GROUPS, BLOCK_GROUPS):
            group = start + tl.arange(0, BLOCK_GROUPS)
            column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            value = tl.load(row_logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
            group_top = tl.max(value, 1)
            tl.store(tops + group, group_top, mask=group < GROUPS)
            highest_tops = tl.maximum(highest_tops, group_top)
            better += (value > own).to(tl.int32)
        peak = tl.max(highest_tops)
        rank = tl.sum(better) + 1
        mass = tl.zeros((BLOCK_GROUPS * GROUP,), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK_GROUPS * GROUP, num_stages=3):
            column = start + tl.arange(0, BLOCK_GROUPS * GROUP)
            value = tl.load(row_logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
            mass += tl.exp(value - peak)
        total = tl.log(tl.sum(mass))
        listed_id = tl.where(entry == 0, chosen, listed_id)
        scores = tl.where(entry == 0, own - peak - total, scores)
        wanted = tl.minimum(tl.minimum(count, VOCAB), WIDTH - 1)
        if wanted > 0:
            tl.debug_barrier()  # other threads of the block read what this one stored in `tops`
            group = tl.arange(0, BLOCK_ALL)
            gap = peak - tl.load(tops + group, mask=group < GROUPS, other=float("-inf"))
            bound = bounding_gap(gap, tl.full((BLOCK_ALL,), 1.0, tl.float32), wanted.to(tl.float32))
            num_listed = list_groups(listed, (gap <= bound) & (group < GROUPS))
            # The next token is the first one after the last found, by descending logit, then ascending id.
            score, last = float("inf"), -1
            for place in range(1, wanted + 1):
                best = float("-inf")
                where = NOWHERE
                for start in range(0, num_listed, BLOCK_GROUPS):
                    column = listed_tokens(listed, start, num_listed, GROUPS, VOCAB, BLOCK_GROUPS)
                    there = column != NOWHERE
                    value = tl.load(row_logits + column, mask=there, other=float("-inf")).to(tl.float32)
                    behind = there & ((value < score) | ((value == score) & (column > last)))
                    highest = tl.max(tl.where(behind, value, float("-inf")))
                    lowest = tl.min(tl.where(behind & (value == highest), column, NOWHERE))
                    # Groups are listed in ascending order: among equals, keep the first one found.
                    better_one = (highest > best) | (where == NOWHERE)
                    where = tl.where(better_one, lowest, where)
                    best = tl.where(better_one, highest, best)
                score, last = best, where
                listed_id = tl.where(entry == place, last, listed_id)
                scores = tl.where(entry == place, score - peak - total, scores)
    tl.store(ids + row * WIDTH + entry, listed_id, mask=entry < WIDTH)
    tl.store(logprobs + row * WIDTH + entry, scores, mask=entry < WIDTH)
    tl.store(ranks + row, rank)
