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
    """The block sizes that decide where a prompt may be split into chunks, and how many positions a decode step
    processes. A causal model that decodes token by token has granule 1 and denoised 0.

    granule    size of the blocks of positions that see each other in both directions, by the attention mask: a prompt
               chunk ends at a multiple of it, or at the end of the sequence
    denoised   block diffusion: size of the block of positions that a decode step processes together, and accepts as a
               whole or not at all

    With block diffusion, the last tokens of a sequence that do not fill a block are processed in a block whose other
    positions are masked.
    """

    granule: int = 1
    denoised: int = 0

    def fed(self, num_tokens: int) -> int:
        """Return how many positions a sequence of `num_tokens` tokens must process before its next token is sampled.
        For most models that is `num_tokens`; with block diffusion, the block being generated is included."""
        return self.final(num_tokens) + self.denoised if self.denoised else num_tokens

    def most_fed(self, total: int) -> int:
        """Return how many positions a sequence processes until it has `total` tokens. For most models that is `total` -
        1: the last token is sampled, but not processed."""
        return self.fed(total - 1)

    def final(self, num_tokens: int) -> int:
        """Return how many of a sequence's first `num_tokens` tokens have final keys and values, which no later token
        changes. That is every token with causal attention; with larger blocks, only the tokens of full blocks."""
        whole = max(self.granule, self.denoised)
        return num_tokens // whole * whole

    def findable(self, num_tokens: int) -> int:
        """Return how many of a sequence's `num_tokens` tokens may come from the prefix cache. The sequence must process
        at least the last token itself, to get logits."""
        return self.final(num_tokens) if self.denoised else num_tokens - 1

    def piece(self, start: int, end: int, goal: int) -> int:
        """Return the length of the next prompt chunk, which begins at position `start`. It ends at `end`, or at the
        last position before it where the prompt may be split. `goal` is the end of the prompt. A result of 0 or less
        means that no chunk fits."""
        return (goal if end >= goal else end // self.granule * self.granule) - start

    def least(self, start: int, goal: int) -> int:
        """Return the length of the shortest prompt chunk from position `start` on, or what is left up to the prompt's
        end `goal` if that is less. With causal attention the length is 1. If positions see each other in both
        directions in blocks, such as the tokens of a block diffusion model, it is one block."""
        return min(self.granule, goal - start)

    def shared(self, pages: int, page_size: int) -> int:
        """Return how many of a sequence's first `pages` pages other sequences may share. The number is rounded down to
        the end of a block of positions that see each other in both directions (for example with block diffusion)."""
        unit = math.lcm(max(self.granule, self.denoised), page_size) // page_size
        return pages // unit * unit


ONE_BY_ONE = Blocks()


def blocks_of(plans: Plans) -> Blocks:
    """Return the block sizes of the programs that run in each step, such as the model and its draft model. Raises
    ArtifactError if the block size of block diffusion is no multiple of the granule, the block size of the attention
    masks."""
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
    """Return how many draft tokens of a sequence the model can verify in one step; 0 if it was compiled without
    speculative decoding."""
    use = parse_ending(plans.plans["main"].ending)
    ending = find_ending(use.name)
    return 0 if ending.all_or_none else ending.fed(use) - 1
