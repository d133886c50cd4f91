"""What a step can still take of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime.batch import Chunk
from ingot.runtime.blocks import Blocks
from ingot.runtime.request import Request
from ingot.runtime.scheduler_config import SchedulerConfig


@dataclass
class StepRoom:
    """Tokens, and rows of logits that rate prompts; pieces of prompts are cut as `blocks` say."""

    blocks: Blocks
    tokens: int
    scored: int = MAX_SCORED

    def fit(self, request: Request, start: int) -> int:
        """How many tokens of a prompt go into the step, from position `start` on."""
        goal = self.blocks.fed(request.num_tokens)
        length = min(goal - start, self.tokens)
        scored = request.scored_in(start, start + length)
        if len(scored) > self.scored:
            length = scored.start + self.scored - start
        return self.blocks.piece(start, start + length, goal)

    def take(self, chunk: Chunk) -> None:
        self.tokens -= chunk.length
        self.scored -= len(chunk.scored)


def prompt_tokens(config: SchedulerConfig, decodes: Sequence[Request], chunks: Sequence[Chunk]) -> int:
    """How many tokens of prompts a step takes beside those of sequences that decode. Where a caller waits for their
    tokens, a long step is one long wait; a prompt that may not be cut is not held back even so, or it could be for
    ever."""
    left = config.max_tokens - len(decodes) - sum(chunk.length for chunk in chunks)
    decoding = chain(decodes, (chunk.request for chunk in chunks))
    cut = config.chunked_prefill and config.blocks.granule <= config.max_mixed_tokens
    held_back = cut and any(request.given.streamed for request in decoding)
    return min(left, config.max_mixed_tokens) if held_back else left
