"""Conversion of a step's log-probabilities to the callers' outputs."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from ingot.runtime.engines.outputs import Logprob


class TextDecoder(Protocol):
    """The method of `Tokenizer` that SequenceLogprobs calls. It returns the text of one token."""

    def decode_alone(self, token_id: int, skip_special_tokens: bool) -> str: ...


class StepLogprobs(Protocol):
    """The log-probabilities that one step has computed, for each row of logits."""

    def row(self, index: int) -> tuple[list[int], list[float], int]:
        """Return the log-probabilities of row `index` of logits: (token ids, their log-probabilities, rank of the first
        token).

        The first token is the sampled one, or for prompt_logprobs the prompt's next token. After it come the most
        likely tokens, as many as the request wants.
        """
        ...


class OutputLogprobs:
    """The log-probabilities that one step has computed, from tensors. The first axis counts rows of logits.

    ids      [L, K] token ids; -1 ends a row
    values   [L, K] their log-probabilities
    ranks    [L] the rank of the first token of each row
    """

    def __init__(self, ids: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor) -> None:
        # Convert all rows at once: indexing one tensor row costs as much as converting thirty rows.
        self._ids, self._values, self._ranks = ids.tolist(), values.tolist(), ranks.tolist()

    def row(self, index: int) -> tuple[list[int], list[float], int]:
        """Return the log-probabilities of row `index` of logits: (token ids, their log-probabilities, rank of the first
        token).

        The first token is the sampled one, or for prompt_logprobs the prompt's next token. After it come the most
        likely tokens, as many as the request wants.
        """
        ids = [token for token in self._ids[index] if token >= 0]
        return ids, self._values[index][: len(ids)], self._ranks[index]


@dataclass
class SequenceLogprobs:
    """Collects the log-probabilities of the tokens of one sequence, or of one prompt.

    tokenizer    makes the texts of tokens; None: they have none
    entries      for each token a dict token id -> log-probability, with the token first, then the most likely tokens. A
                 prompt's first entry is None, because its first token has no log-probability
    cumulative   the sum of the tokens' log-probabilities
    """

    tokenizer: TextDecoder | None
    entries: list[dict[int, Logprob] | None] = field(default_factory=list)
    cumulative: float = 0.0

    def add(self, logprobs: StepLogprobs, row: int) -> None:
        ids, values, rank = logprobs.row(row)
        ranks = (rank, *range(1, len(ids)))
        # A sampled token that is also among the most likely ones appears once, first.
        self.entries.append(
            {
                token: Logprob(value, place, self._text(token))
                for token, value, place in zip(ids, values, ranks, strict=True)
            }
        )
        self.cumulative += values[0]

    def _text(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode_alone(token, skip_special_tokens=False)
