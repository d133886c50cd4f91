"""Log-probabilities from a step's outputs to what callers see."""

from dataclasses import dataclass, field
from typing import Protocol

from ingot.runtime.outputs import Logprob


class TextDecoder(Protocol):
    """What naming a token needs of a tokenizer."""

    def name_of(self, token_id: int) -> str: ...


class StepLogprobs(Protocol):
    """The log-probabilities of a step, by row of logits."""

    def row(self, index: int) -> tuple[list[int], list[float], int]:
        """Ids and log-probabilities of a row, the chosen token in front and those that were not asked for left out;
        and the chosen token's rank."""
        ...


@dataclass
class SequenceLogprobs:
    """The log-probabilities of one sequence, a dict for each token, and their sum over the chosen tokens.

    `entries` of a prompt begin with None, for the token that nothing comes before.
    """

    tokenizer: TextDecoder | None
    entries: list[dict[int, Logprob] | None] = field(default_factory=list)
    cumulative: float = 0.0

    def add(self, logprobs: StepLogprobs, row: int) -> None:
        ids, values, rank = logprobs.row(row)
        ranks = (rank, *range(1, len(ids)))
        # A chosen token that is also among the most likely ones stands once, in front.
        self.entries.append(
            {
                token: Logprob(value, place, self._text(token))
                for token, value, place in zip(ids, values, ranks, strict=True)
            }
        )
        self.cumulative += values[0]

    def _text(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.name_of(token)
