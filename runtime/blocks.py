"""Blocks of positions that a step must hold completely: where a prompt may be split into chunks, and how many positions
a decode step feeds."""

import math
from dataclasses import dataclass

from ingot.ir.artifact.plan import PLAN_FILE, Plans
from ingot.ir.errors import ArtifactError
from ingot.ir.features import find_ending
from ingot.ir.parse import parse_ending


@dataclass(frozen=True)
class Blocks:
    """The sizes of blocks of positions that the model's masks and ending require.

    granule   the number of positions that see each other, earlier and later ones: a prompt chunk ends at a multiple of
              it, or at the end of the sequence
    denoised  with an ending that denoises blocks: the positions of a block, which a decode step feeds together, and
              commits all or none; 0 for other endings

    With `denoised`, the last tokens of a sequence that fill no block are fed in a block with masked positions.
    """

    granule: int = 1
    denoised: int = 0

    def fed(self, num_tokens: int) -> int:
        """Return how many positions a sequence of `num_tokens` tokens has fed when it gets its next tokens."""
        return self.final(num_tokens) + self.denoised if self.denoised else num_tokens

    def most_fed(self, total: int) -> int:
        """Return how many positions a sequence feeds until it has `total` tokens. The last one is not fed."""
        return self.fed(total - 1)

    def final(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens have final keys and values: no later token changes them."""
        whole = max(self.granule, self.denoised)
        return num_tokens // whole * whole

    def findable(self, num_tokens: int) -> int:
        """Return how many of its `num_tokens` tokens a sequence may take from the prefix cache. It must feed the others
        to get new tokens."""
        return self.final(num_tokens) if self.denoised else num_tokens - 1

    def piece(self, start: int, end: int, goal: int) -> int:
        """Return the length of a prompt chunk that begins at position `start` and ends at `end` or earlier, where the
        prompt may be split. `goal` is the end of the prompt. At most 0: no chunk fits."""
        return (goal if end >= goal else end // self.granule * self.granule) - start

    def least(self, start: int, goal: int) -> int:
        """Return the fewest tokens of a prompt that a step can feed from position `start` on: those that see each
        other, up to the prompt's end `goal`."""
        return min(self.granule, goal - start)

    def shared(self, pages: int, page_size: int) -> int:
        """Return the largest number of first pages, at most `pages`, that ends where a granule or block of positions
        ends."""
        unit = math.lcm(max(self.granule, self.denoised), page_size) // page_size
        return pages // unit * unit


ONE_BY_ONE = Blocks()


def blocks_of(plans: Plans) -> Blocks:
    """Return the block sizes of the entries that run in each step. Raises ArtifactError if the ending's blocks are no
    multiple of the masks'."""
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
    """Return how many draft tokens a sequence may feed after its last token; 0 if the ending of `main` verifies
    none."""
    use = parse_ending(plans.plans["main"].ending)
    ending = find_ending(use.name)
    return 0 if ending.all_or_none else ending.fed(use) - 1
