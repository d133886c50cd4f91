"""Random logit edits for tests of `sample`, and plain code in float64 that applies them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ingot.ir.edit_limits import MAX_BAD_WORDS, MAX_BIASES
from ingot.ir.ops.logit_edits import ANY_TOKEN, EditParts


@dataclass(frozen=True)
class DrawnEdit:
    """The edits of one sequence: biases by token, the allowed tokens, and pairs (after, banned)."""

    biases: dict[int, float]
    allowed: frozenset[int]
    pairs: tuple[tuple[int, int], ...]


def draw_edit(g: torch.Generator, vocab: int) -> DrawnEdit:
    """About half of the tokens are allowed, always token 0; up to nine have a bias, and up to four a ban."""

    def some(most: int) -> list[int]:
        return torch.randperm(vocab, generator=g)[: int(torch.randint(0, most, (1,), generator=g))].tolist()

    biases = {token: float(torch.randn(1, generator=g) * 5) for token in some(10)}
    allowed = {0, *(torch.rand(vocab, generator=g) < 0.5).nonzero().flatten().tolist()}
    pairs = [(ANY_TOKEN if place % 2 else token % 2, token) for place, token in enumerate(some(5)) if token]
    return DrawnEdit(biases, frozenset(allowed), tuple(pairs))


def packed(edit: DrawnEdit, vocab: int) -> torch.Tensor:
    """The row of the state `edits`, by its documented layout."""
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in edit.allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    ids, biases = [-1] * MAX_BIASES, np.zeros(MAX_BIASES, np.float32)
    ids[3 : 3 + len(edit.biases)] = list(edit.biases)  # unused entries may come first
    ids = ids[:MAX_BIASES]
    biases[3 : 3 + len(edit.biases)] = list(edit.biases.values())
    after, banned = ([pair[place] for pair in edit.pairs] for place in (0, 1))
    unused = [-1] * (MAX_BAD_WORDS - len(after))
    row = np.concatenate([words.view(np.int32), ids, biases.view(np.int32), [*after, *unused], [*banned, *unused]])
    assert len(row) == EditParts(vocab).words
    return torch.from_numpy(row.astype(np.int32))


def drawn_edits(g: torch.Generator, vocab: int, last_tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The states `edits` and `last_token` with a row for each of `last_tokens`."""
    edits = torch.stack([packed(draw_edit(g, vocab), vocab) for _ in last_tokens])
    return edits, torch.tensor(last_tokens, dtype=torch.int32)


def edited_by_hand(logits: torch.Tensor, edit: DrawnEdit, last: int) -> list[float]:
    """Logits [V] after the edits, in float64."""
    banned = {token for after, token in edit.pairs if after in (ANY_TOKEN, last)}
    return [
        float(value) + edit.biases.get(token, 0.0) if token in edit.allowed - banned else -np.inf
        for token, value in enumerate(logits.double().tolist())
    ]
