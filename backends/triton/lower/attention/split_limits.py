"""Choose into how many splits decode attention may divide a context (split-K)."""

from dataclasses import dataclass

from ingot.backends.triton.lower.attention.problem import MOST_DECODED, DecodeProblem
from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.backends.triton.lower.sizes import power_of_two, tile_width

# The most splits of one context, also if another launch merges them, and of all tokens of a step together. Each split
# needs a result row of scratch memory.
_MAX_SPLITS, _MAX_APART, _ALL_SPLITS = 64, 128, 2 * MOST_DECODED
# A long context may have this many splits with any number of tokens. Otherwise a context of 32k among hundreds of short
# ones would keep its multiprocessor busy for longer than all others take.
_LEAST_SPLITS = 8
# Elements of partial results merged at once: 128 per thread of 4 warps for steps of one token, else 64, since more
# programs run.
_COMBINED = {True: 16384, False: 8192}
# Most q heads merged per iteration. For all 71 of Falcon 7B at once, LLVM takes half a minute.
_COMBINED_HEADS = 32
# From so many numbers of a split's result on, another launch merges the splits, by many programs. One program made a
# call take 65 us, and not 11, for one token over 512 latents with 16 heads of 512 numbers on an H200.
_APART = 4096
# In steps of up to this many tokens, a context has at least two splits.
_HALVED = 16
# A context has up to this many splits that do not depend on its length, if all of them fit on the device at once. They
# begin to load before the lengths are known: with 32 tokens of 512 positions and 4 k/v heads, two take 1 us of 17 less.
_MOST_BASE = 4
# The most splits of a context in steps of one token, if they are merged in the same launch. There are more only if each
# then still has a multiprocessor of its own: on 132, two k/v heads have 64 splits each, and three have 32. More cost
# more time to merge: with 4 k/v heads and 512 positions, 64 take 7.1 us on an H200 and 32 take 4.3 us.
_SPLITS_OF_ONE = 32


@dataclass(frozen=True)
class SplitLimits:
    """The limits of split-K in decode attention: how many programs (splits) may share one context.

    Each (token, k/v head) has at least `base` and at most `most` splits. The kernel divides the positions that all
    tokens read into `shares` parts. A context longer than a part gets more splits. If `shares` is 0, all contexts have
    `base` splits. With `apart`, another launch merges the results of splits.
    """

    base: int
    most: int
    shares: int
    apart: bool


def heads_at_once(problem: DecodeProblem) -> int:
    """Return for how many q heads the decode kernel merges splits in one iteration of its loop."""
    return min(power_of_two(problem.group), _COMBINED_HEADS)


def splits_at_once(problem: DecodeProblem) -> int:
    """Return how many splits (parts of a context) the decode kernel merges in one iteration of its loop."""
    width = heads_at_once(problem) * tile_width(problem.cache_form.value_width)
    return max(1, _COMBINED[problem.tokens == 1] // width)


def split_limits(problem: DecodeProblem, tiles: DecodeTiles, cores: int) -> SplitLimits:
    """Return the limits of split-K for a decode attention, on a GPU of `cores` multiprocessors.

    In steps of one token, all contexts have equally many splits. In other steps, long contexts get more splits.
    """
    apart = problem.group * tile_width(problem.cache_form.value_width) >= _APART
    shares = max(1, tiles.programs * cores // problem.kv_heads)
    if problem.tokens == 1:
        enough = max(_SPLITS_OF_ONE, _power_below(cores // problem.kv_heads))
        base = min(_MAX_APART if apart else min(_MAX_SPLITS, enough), _power_below(shares))
        return SplitLimits(base, base, 0, apart)
    most = min(_MAX_SPLITS, max(_LEAST_SPLITS, _ALL_SPLITS // problem.tokens))
    fitting = min(_MOST_BASE, _power_below(shares // problem.tokens))
    return SplitLimits(max(fitting, 2 if problem.tokens <= _HALVED else 1), most, shares, apart)


def _power_below(number: int) -> int:
    """Return the largest power of two that is at most `number`, and 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)
