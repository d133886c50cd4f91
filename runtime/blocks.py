"""The blocks of a sequence's tokens: where a prompt may be split into chunks, and what a decode step feeds."""

import math
from dataclasses import dataclass

from ingot.ir.artifact.plan import PLAN_FILE, Plans
from ingot.ir.errors import ArtifactError
from ingot.ir.features import find_ending
from ingot.ir.parse import parse_ending


@dataclass(frozen=True)
class Blocks:
    """granule   positions that see each other, before and after: a chunk ends at a multiple of it, or at the end of the
              sequence
    denoised  positions of the block that a decode step feeds, and commits completely or not at all; 0: each fed token
              yields the next one

    With `denoised`, the last tokens of a sequence that fill no block are fed in a block with masked positions.
    """

    granule: int = 1
    denoised: int = 0

    def fed(self, num_tokens: int) -> int:
        """Return how many positions a sequence of `num_tokens` tokens feeds before it gets new ones."""
        return self.final(num_tokens) + self.denoised if self.denoised else num_tokens

    def most_fed(self, total: int) -> int:
        """Return how many positions a sequence feeds until it has `total` tokens. The last token is not fed."""
        return self.fed(total - 1)

    def final(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens have final keys and values: no later token changes them."""
        whole = max(self.granule, self.denoised)
        return num_tokens // whole * whole

    def findable(self, num_tokens: int) -> int:
        """Return how many tokens a sequence may find in the prefix cache. It must feed the rest to get new tokens."""
        return self.final(num_tokens) if self.denoised else num_tokens - 1

    def piece(self, start: int, end: int, goal: int) -> int:
        """Return the length of the chunk that begins at `start`, for a step with room up to `end`. The sequence feeds
        `goal` tokens in all."""
        return (goal if end >= goal else end // self.granule * self.granule) - start

    def least(self, start: int, goal: int) -> int:
        """Return the fewest tokens that a step can feed from `start` on."""
        return min(self.granule, goal - start)

    def shared(self, pages: int, page_size: int) -> int:
        """Return the largest page count, up to `pages`, that ends at a granule or block."""
        unit = math.lcm(max(self.granule, self.denoised), page_size) // page_size
        return pages // unit * unit


ONE_BY_ONE = Blocks()


def blocks_of(plans: Plans) -> Blocks:
    """Return the blocks of the entries that run in each step. Raises ArtifactError if they do not fit each other."""
    use = parse_ending(plans.plans["main"].ending)
    ending = find_ending(use.name)
    denoised = ending.fed(use) if ending.all_or_none else 0
    granule = math.lcm(*(plans.plans[entry].granule for entry in plans.round))
    if denoised % granule:
        raise ArtifactError(
            f"the ending denoises blocks of {denoised} positions, but the masks let {granule} positions see each other",
            where=PLAN_FILE,
            expected=f"a multiple of {granule}",
            hint="compile a definition whose ending and masks have blocks of the same size",
        )
    return Blocks(granule, denoised)


def max_drafts(plans: Plans) -> int:
    """Return how many draft tokens a sequence may feed after its last token, by the ending of `main`."""
    use = parse_ending(plans.plans["main"].ending)
    ending = find_ending(use.name)
    return 0 if ending.all_or_none else ending.fed(use) - 1
