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
    """The block sizes that limit how the tokens of a sequence are divided into steps. A causal model that decodes token
    by token has granule 1 and denoised 0.

    granule    the size of the blocks of positions that see each other in both directions, by the attention mask. A
               prompt chunk ends at a multiple of it, or at the end of the sequence
    denoised   block diffusion: the size of the block that a decode step processes. All its tokens are accepted, or
               none; 0 for other models

    With block diffusion, a sequence's last tokens may not fill a block. They are then processed in a block whose other
    positions are masked.
    """

    granule: int = 1
    denoised: int = 0

    def fed(self, num_tokens: int) -> int:
        """Return how many positions must be processed before the next token of a sequence of `num_tokens` tokens is
        sampled. For most models this is `num_tokens`. With block diffusion, it includes the whole block that is being
        generated."""
        return self.final(num_tokens) + self.denoised if self.denoised else num_tokens

    def most_fed(self, total: int) -> int:
        """Return how many positions a sequence processes until it has `total` tokens. For most models this is `total` -
        1, because the last token is sampled and not processed. With block diffusion it is `total`, rounded up to full
        blocks."""
        return self.fed(total - 1)

    def final(self, num_tokens: int) -> int:
        """Return how many of a sequence's first `num_tokens` tokens have final keys and values. Later tokens do not
        change these. With causal attention they are all tokens; with larger blocks, the tokens of full blocks."""
        whole = max(self.granule, self.denoised)
        return num_tokens // whole * whole

    def findable(self, num_tokens: int) -> int:
        """Return how many of a sequence's `num_tokens` tokens may come from the prefix cache. For most models this is
        all but the last, which must be processed to get logits. With block diffusion, these are the tokens of full
        blocks."""
        return self.final(num_tokens) if self.denoised else num_tokens - 1

    def piece(self, start: int, end: int, goal: int) -> int:
        """Return the length of the next prompt chunk, or a number below 1 if no chunk fits.

        start   the chunk's first position
        end     the position at which the chunk must end at the latest. It may end earlier, where the prompt may be
                split
        goal    the end of the prompt
        """
        return (goal if end >= goal else end // self.granule * self.granule) - start

    def least(self, start: int, goal: int) -> int:
        """Return the length of the shortest prompt chunk that may begin at position `start`. This is one token with
        causal attention, and one block if positions see each other in blocks. It is never more than what is left up to
        `goal`, the end of the prompt."""
        return min(self.granule, goal - start)

    def shared(self, pages: int, page_size: int) -> int:
        """Return how many of a sequence's first `pages` pages other sequences may share. With causal attention, these
        are all. If positions see each other in blocks, the shared pages must end at the end of a block."""
        unit = math.lcm(max(self.granule, self.denoised), page_size) // page_size
        return pages // unit * unit


ONE_BY_ONE = Blocks()


def blocks_of(plans: Plans) -> Blocks:
    """Return the block sizes that the programs of a step require, such as the model and its draft model. Raises
    ArtifactError if the block of block diffusion is no multiple of the attention mask's block."""
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
    """Return the most draft tokens of a sequence that one step can verify; 0 for a model without speculative
    decoding."""
    use = parse_ending(plans.plans["main"].ending)
    ending = find_ending(use.name)
    return 0 if ending.all_or_none else ending.fed(use) - 1
