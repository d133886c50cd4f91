"""What a step can still take of prompts."""

from dataclasses import dataclass

from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime.batch import Chunk
from ingot.runtime.blocks import Blocks
from ingot.runtime.request import Request


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
