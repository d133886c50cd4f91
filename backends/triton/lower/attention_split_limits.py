"""Limits of the splits of contexts in decode attention."""

from dataclasses import dataclass

from ingot.backends.triton.lower.attention_problem import MOST_DECODED, DecodeProblem
from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.lower.sizes import power_of_two, tile_width

# The most splits of one context, and of all tokens of a step together. Scratch memory is a result row per split.
_MAX_SPLITS, _ALL_SPLITS = 64, 2 * MOST_DECODED
# A long context may have this many splits with any number of tokens. Otherwise a context of 32k among hundreds of short
# ones would keep its multiprocessor busy for longer than all others take.
_LEAST_SPLITS = 8
# Elements of partial results merged at once: 128 per thread of 4 warps for steps of one token, else 64, since more
# programs run.
_COMBINED = {True: 16384, False: 8192}
# Most q heads merged per iteration. For all 71 of Falcon 7B at once, LLVM takes half a minute.
_COMBINED_HEADS = 32
# Most iterations of the merge for caches of unequal widths. The merge is unrolled, so each adds compile time.
_ROUNDS = 16
# In steps of up to this many tokens, a context has at least two splits.
_HALVED = 16


@dataclass(frozen=True)
class SplitLimits:
    """Each (token, head) has `base` splits, and up to `most` if its context is long.

    A context is long by comparison with the positions that all tokens read, divided into `shares` parts. With 0 shares,
    no context has more than `base` splits.
    """

    base: int
    most: int
    shares: int


def heads_at_once(problem: DecodeProblem) -> int:
    """Return how many of the q heads that read one cache head are merged per iteration."""
    return min(power_of_two(problem.group), _COMBINED_HEADS)


def splits_at_once(problem: DecodeProblem) -> int:
    """Return how many splits are merged per iteration."""
    result = heads_at_once(problem) * tile_width(problem.cache_form.value_width)
    return max(1, _COMBINED[problem.tokens == 1] // result)


def split_limits(problem: DecodeProblem, tiles: DecodeTiles, cores: int) -> SplitLimits:
    """Return the limits for a GPU of `cores` multiprocessors. With many tokens, only long contexts get more splits."""
    most_splits = _MAX_SPLITS
    if not problem.cache_form.equal:
        most_splits = min(most_splits, _ROUNDS * splits_at_once(problem))
    shares = max(1, tiles.programs * cores // problem.kv_heads)
    if problem.tokens == 1:
        base = min(most_splits, 1 << (shares.bit_length() - 1))
        return SplitLimits(base, base, 0)
    most = min(most_splits, max(_LEAST_SPLITS, _ALL_SPLITS // problem.tokens))
    return SplitLimits(2 if problem.tokens <= _HALVED else 1, most, shares)
