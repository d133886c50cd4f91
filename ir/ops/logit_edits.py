"""Edits of the logits of one request: biases, allowed tokens, and tokens that must not follow a certain token.

The state `edits` i32[R, words] has a row for each running sequence. The host writes a row before a step, and only for
sequences with edits. The parts of a row, in order (`EditParts`):

allowed   ceil(vocab / 32) words: bit v % 32 of word v // 32 is set if token v may be chosen
biased    MAX_BIASES ids of tokens with a bias, each at most once; -1: unused
biases    the bias of each of these tokens, as the bits of a float32
after     MAX_BAD_WORDS token ids, for `banned`; ANY_TOKEN: any token
banned    MAX_BAD_WORDS token ids: such a token may not be chosen if the sequence's last token is that in `after`; -1:
          unused
"""

from dataclasses import dataclass

import torch

from ingot.ir.edit_limits import MAX_BAD_WORDS, MAX_BIASES

ANY_TOKEN = -1
WORD_BITS = 32


@dataclass(frozen=True)
class EditParts:
    """Where the parts of a row of `edits` begin, for a vocabulary of `vocab` tokens; `words` is the length of a row."""

    vocab: int

    @property
    def allowed_words(self) -> int:
        return -(-self.vocab // WORD_BITS)

    @property
    def biased(self) -> int:
        return self.allowed_words

    @property
    def biases(self) -> int:
        return self.biased + MAX_BIASES

    @property
    def after(self) -> int:
        return self.biases + MAX_BIASES

    @property
    def banned(self) -> int:
        return self.after + MAX_BAD_WORDS

    @property
    def words(self) -> int:
        return self.banned + MAX_BAD_WORDS


def add_biases(logits: torch.Tensor, edits: torch.Tensor) -> None:
    """Add the biases in a row of `edits` i32[words] to logits [V], in place."""
    parts = EditParts(logits.shape[0])
    used = edits[parts.biased : parts.biases] >= 0
    ids = edits[parts.biased : parts.biases][used].long()
    logits[ids] += edits[parts.biases : parts.after].view(torch.float32)[used].to(logits.dtype)


def forbid(logits: torch.Tensor, edits: torch.Tensor, last: torch.Tensor) -> None:
    """Set logits [V] to -inf in place, for the tokens that a row of `edits` i32[words] does not allow after the token
    `last` i32[]."""
    parts = EditParts(logits.shape[0])
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=edits.device)
    allowed = (edits[: parts.allowed_words, None] >> bits) & 1
    logits.masked_fill_(allowed.flatten()[: parts.vocab] == 0, float("-inf"))
    after, banned = edits[parts.after : parts.banned], edits[parts.banned : parts.words]
    applies = (banned >= 0) & ((after == ANY_TOKEN) | (after == last))
    logits[banned[applies].long()] = float("-inf")
