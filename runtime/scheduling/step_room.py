"""How many prompt tokens still fit into the step being built."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime.scheduling.batch import Chunk
from ingot.runtime.scheduling.blocks import Blocks
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig


@dataclass
class StepRoom:
    """How much still fits into the step being built.

    blocks   the block sizes that decide where prompts may be split
    tokens   prompt tokens that still fit
    scored   rows of logits for prompt_logprobs that still fit
    places   sequences that still fit; None: any number
    """

    blocks: Blocks
    tokens: int
    scored: int = MAX_SCORED
    places: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether no token of a further sequence fits."""
        return self.tokens <= 0 or (self.places is not None and self.places <= 0)

    def fit(self, request: Request, start: int) -> int:
        """Return how many tokens of a request's prompt, from position `start` on, still fit into the step. A result
        below 1 means that none fit."""
        goal = self.blocks.fed(request.num_tokens)
        length = min(goal - start, self.tokens)
        scored = request.scored_in(start, start + length)
        if len(scored) > self.scored:
            length = scored.start + self.scored - start
        return self.blocks.piece(start, start + length, goal)

    def take(self, chunk: Chunk) -> None:
        self.tokens -= chunk.length
        if self.places is not None:
            self.places -= 1
        self.scored -= len(chunk.scored)


def prompt_tokens(config: SchedulerConfig, decodes: Sequence[Request], chunks: Sequence[Chunk]) -> int:
    """Return how many prompt tokens fit into a step that has one token of each request in `decodes`, and `chunks`.

    While a request with streamed output decodes, at most max_mixed_tokens fit, to bound the time between its tokens.
    This limit is off if prompts cannot be split into chunks of that size. With it, a long prompt would wait forever.
    """
    left = config.max_tokens - len(decodes) - sum(chunk.length for chunk in chunks)
    decoding = chain(decodes, (chunk.request for chunk in chunks))
    splits = config.chunked_prefill and config.blocks.granule <= config.max_mixed_tokens
    capped = splits and any(request.given.streamed for request in decoding)
    return min(left, config.max_mixed_tokens) if capped else left
