"""How the tokens of a sequence fall into blocks: where a prompt may be cut, and what a decode step feeds at once."""

import math
from dataclasses import dataclass

from ingot.ir.artifact.plan import PLAN_FILE, Plans
from ingot.ir.errors import ArtifactError
from ingot.ir.features import find_ending
from ingot.ir.parse import parse_ending


@dataclass(frozen=True)
class Blocks:
    """granule   positions that see each other, before and after: what a step feeds ends with a multiple of it, or with
              the sequence
    denoised  positions of the block that a decode step feeds, and of which it commits all or none; 0: each token fed
              gives the one after it

    With `denoised`, the tokens at the end of a sequence that fill no block are fed in one with masked positions.
    """

    granule: int = 1
    denoised: int = 0

    def fed(self, num_tokens: int) -> int:
        """Positions to feed until a sequence of so many tokens gets new ones."""
        return self.final(num_tokens) + self.denoised if self.denoised else num_tokens

    def most_fed(self, total: int) -> int:
        """Positions that a sequence feeds which comes to `total` tokens: of these the last gives no other."""
        return self.fed(total - 1)

    def final(self, num_tokens: int) -> int:
        """Of the first so many tokens those whose keys and values no later token changes."""
        whole = max(self.granule, self.denoised)
        return num_tokens // whole * whole

    def findable(self, num_tokens: int) -> int:
        """Tokens that a sequence may find in the prefix cache: what it feeds besides gives its next tokens."""
        return self.final(num_tokens) if self.denoised else num_tokens - 1

    def piece(self, start: int, end: int, goal: int) -> int:
        """How many tokens a step feeds from `start` that has room for those up to `end`, of a sequence that feeds
        `goal`."""
        return (goal if end >= goal else end // self.granule * self.granule) - start

    def least(self, start: int, goal: int) -> int:
        """The fewest tokens that a step can feed from `start` on."""
        return min(self.granule, goal - start)

    def shared(self, pages: int, page_size: int) -> int:
        """Of the first so many pages of a sequence those that end with a granule."""
        unit = math.lcm(max(self.granule, self.denoised), page_size) // page_size
        return pages // unit * unit


ONE_BY_ONE = Blocks()


def blocks_of(plans: Plans) -> Blocks:
    """The blocks of the entries that run in each step. Raises ArtifactError where they do not fit each other."""
    use = parse_ending(plans.plans["main"].ending)
    ending = find_ending(use.name)
    denoised = ending.fed(use) if ending.all_or_none else 0
    granule = math.lcm(*(plans.plans[entry].granule for entry in plans.round))
    if denoised % granule:
        raise ArtifactError(
            f"blocks of {denoised} positions are denoised, where {granule} positions see each other",
            where=PLAN_FILE,
            expected=f"a multiple of {granule}",
            hint="compile a definition whose ending has blocks of the size that its masks have",
        )
    return Blocks(granule, denoised)


def max_drafts(plans: Plans) -> int:
    """Tokens that a sequence may feed after its last one, as the ending of `main` says."""
    use = parse_ending(plans.plans["main"].ending)
    ending = find_ending(use.name)
    return 0 if ending.all_or_none else ending.fed(use) - 1
