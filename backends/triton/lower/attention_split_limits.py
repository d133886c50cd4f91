"""How far the contexts of a step of few tokens are cut."""

from dataclasses import dataclass

from ingot.backends.triton.lower.attention_problem import MOST_DECODED, DecodeProblem
from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.lower.sizes import power_of_two, tile_width

# The most splits of one context, and of all tokens of a step: what they leave behind is that many times its result.
_MAX_SPLITS, _ALL_SPLITS = 64, 2 * MOST_DECODED
# However many tokens: a context of 32k among hundreds of short ones would else keep its multiprocessor busy for longer
# than all others take.
_LEAST_SPLITS = 8
# Elements of partial results that are added at once: 128 for each thread of 4 warps, and 64 where more programs run.
_COMBINED = {True: 16384, False: 8192}
# Heads of q that are put together in one round. For all 71 of Falcon 7B at once, LLVM takes half a minute.
_COMBINED_HEADS = 32
# Rounds in which the splits are put together where values are not beside keys of their width. There is no loop: each is
# code, which takes its time to compile.
_ROUNDS = 16
# Up to this many tokens, a context is split in two at least.
_HALVED = 16


@dataclass(frozen=True)
class SplitLimits:
    """Each (token, head) has `base` splits for certain, and `most` where its context is long: by what all tokens read,
    in `shares` parts; 0: no context has more than the certain ones."""

    base: int
    most: int
    shares: int


def heads_at_once(problem: DecodeProblem) -> int:
    """Heads of q, among those that read one head of the cache, whose results are put together in one round."""
    return min(power_of_two(problem.group), _COMBINED_HEADS)


def splits_at_once(problem: DecodeProblem) -> int:
    """Splits whose results are put together in one round."""
    result = heads_at_once(problem) * tile_width(problem.cache_form.value_width)
    return max(1, _COMBINED[problem.tokens == 1] // result)


def split_limits(problem: DecodeProblem, tiles: DecodeTiles, cores: int) -> SplitLimits:
    """On a GPU of so many multiprocessors. With many tokens, long contexts get what is to spare."""
    most_splits = _MAX_SPLITS
    if not problem.cache_form.equal:
        most_splits = min(most_splits, _ROUNDS * splits_at_once(problem))
    shares = max(1, tiles.programs * cores // problem.kv_heads)
    if problem.tokens == 1:
        base = min(most_splits, 1 << (shares.bit_length() - 1))
        return SplitLimits(base, base, 0)
    most = min(most_splits, max(_LEAST_SPLITS, _ALL_SPLITS // problem.tokens))
    return SplitLimits(2 if problem.tokens <= _HALVED else 1, most, shares)
