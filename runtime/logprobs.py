"""Log-probabilities from a step's outputs to what callers see."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from ingot.runtime.outputs import Logprob


class TextDecoder(Protocol):
    """What naming a token needs of a tokenizer."""

    def decode_alone(self, token_id: int, skip_special_tokens: bool) -> str: ...


class StepLogprobs(Protocol):
    """The log-probabilities of a step, by row of logits."""

    def row(self, index: int) -> tuple[list[int], list[float], int]:
        """Ids and log-probabilities of a row, the chosen token in front and those that were not asked for left out;
        and the chosen token's rank."""
        ...


class OutputLogprobs:
    """What `top_logprobs` gives: `ids` and `values` [L, K], those that were asked for in front; `ranks` [L]."""

    def __init__(self, ids: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor) -> None:
        # All at once: taking a row of a tensor costs as much as making a list of thirty rows.
        self._ids, self._values, self._ranks = ids.tolist(), values.tolist(), ranks.tolist()

    def row(self, index: int) -> tuple[list[int], list[float], int]:
        """Ids and log-probabilities of a row as far as they were asked for, the chosen token in front, and its rank."""
        ids = [token for token in self._ids[index] if token >= 0]
        return ids, self._values[index][: len(ids)], self._ranks[index]


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
        return None if self.tokenizer is None else self.tokenizer.decode_alone(token, skip_special_tokens=False)
