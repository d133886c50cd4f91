"""Log-probabilities of chosen and of the likeliest tokens."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # behind all ids


@triton.jit
def top_logprobs(
    logits,
    sampled,
    targets,
    num_logprobs,
    ids,
    logprobs,
    ranks,
    VOCAB: tl.constexpr,
    LOGITS_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The op `top_logprobs`; a program takes one row, and goes over it once more for each token that it lists."""
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    count, target = tl.load(num_logprobs + row), tl.load(targets + row)
    if DEPENDENT:
        gdc_wait()
    chosen = tl.where(target >= 0, target, tl.load(sampled + row))
    entry = tl.arange(0, BLOCK_WIDTH)
    listed = tl.full((BLOCK_WIDTH,), -1, tl.int32)
    scores = tl.full((BLOCK_WIDTH,), float("-inf"), tl.float32)
    rank = 0
    if (count >= 0) & (chosen >= 0):
        row_logits = logits + row * LOGITS_ROW
        own = tl.load(row_logits + chosen)
        peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
        better = tl.zeros((BLOCK,), tl.int32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(row_logits + column, mask=column < VOCAB, other=float("-inf"))
            peaks = tl.maximum(peaks, value)
            better += (value > own).to(tl.int32)
        peak = tl.max(peaks)
        rank = tl.sum(better) + 1
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(row_logits + column, mask=column < VOCAB, other=float("-inf"))
            mass += tl.exp(value - peak)
        total = tl.log(tl.sum(mass))
        listed = tl.where(entry == 0, chosen, listed)
        scores = tl.where(entry == 0, own - peak - total, scores)
        # The next of the list is the largest behind the one before it, in the order of (score, id).
        score, last = float("inf"), -1
        for place in range(1, tl.minimum(tl.minimum(count, VOCAB), WIDTH - 1) + 1):
            best = tl.full((BLOCK,), float("-inf"), tl.float32)
            where = tl.full((BLOCK,), NOWHERE, tl.int32)
            for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
                column = start + tl.arange(0, BLOCK)
                value = tl.load(row_logits + column, mask=column < VOCAB, other=float("-inf"))
                behind = (column < VOCAB) & ((value < score) | ((value == score) & (column > last)))
                # The first one found stays among equals: its id is the lowest.
                better_one = behind & ((value > best) | (where == NOWHERE))
                best = tl.where(better_one, value, best)
                where = tl.where(better_one, column, where)
            score = tl.max(best)
            last = tl.min(tl.where(best == score, where, NOWHERE))
            listed = tl.where(entry == place, last, listed)
            scores = tl.where(entry == place, score - peak - total, scores)
    tl.store(ids + row * WIDTH + entry, listed, mask=entry < WIDTH)
    tl.store(logprobs + row * WIDTH + entry, scores, mask=entry < WIDTH)
    tl.store(ranks + row, rank)
