"""The logit edits of a request: `logit_bias`, `allowed_token_ids` and `bad_words`, as the device reads them.

A sequence with edits has them in its row of the device state `edits` (`ingot.ir.ops.logit_edits`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.ir.edit_limits import MAX_BAD_WORDS
from ingot.ir.errors import RequestError
from ingot.ir.features.request_view import Array
from ingot.ir.ops.logit_edits import ANY_TOKEN, WORD_BITS, EditParts
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.text.tokenizer import Tokenizer

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LogitEdits:
    """The edits of one request, which its n sequences share.

    parts   where the parts of a row of `edits` begin
    base    i32[words], a row without bans: the allowed tokens and the biases
    words   the bad words of several tokens; `base` contains those of one token
    limits  whether `base` forbids any token
    """

    parts: EditParts
    base: Array
    words: tuple[tuple[int, ...], ...]
    limits: bool

    def bans(self, output_ids: Sequence[int], *, in_flight: bool) -> Pairs:
        """Return the bans for the next token, as pairs (after, banned): `banned` may not follow the token `after`.

        The next token may not complete a bad word. `output_ids` are the generated tokens that the host knows. With
        `in_flight`, a step that runs samples one more; `after` is then compared with that token on the device.
        """
        pairs: dict[tuple[int, int], None] = {}
        for word in self.words:
            start = word[:-2] if in_flight else word[:-1]
            if tuple(output_ids[len(output_ids) - len(start) :]) == start and len(output_ids) >= len(start):
                pairs[word[-2] if in_flight else ANY_TOKEN, word[-1]] = None
        return tuple(pairs)

    def allows_only(self, tokens: Collection[int]) -> bool:
        """Return whether no token outside `tokens` may be chosen."""
        bits = np.unpackbits(self.base[: self.parts.allowed_words].view(np.uint8), bitorder="little")
        return bool(bits.sum() == bits[list(tokens)].sum())

    def row(self, bans: Pairs) -> Array:
        """Return the row of `edits`, i32[words], with these bans."""
        row = self.base.copy()
        row[self.parts.after : self.parts.after + len(bans)] = [after for after, _ in bans]
        row[self.parts.banned : self.parts.banned + len(bans)] = [banned for _, banned in bans]
        return row


def edits_of(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer | None) -> LogitEdits | None:
    """Return the edits that sampling parameters ask for; None if they ask for none.

    Raises RequestError for a token id that is not below `vocab_size`, for bad words without a tokenizer, for too many
    of them, and if no token is left to choose.
    """
    if not params.edits_logits:
        return None
    parts, allowed = EditParts(vocab_size), np.ones(vocab_size, np.bool_)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        allowed[:] = False
        allowed[list(params.allowed_token_ids)] = True
    words = _bad_words(params.bad_words, vocab_size, tokenizer)
    allowed[[word[0] for word in words if len(word) == 1]] = False
    if not allowed.any():
        raise RequestError(
            "bad_words bans every token of allowed_token_ids",
            where="SamplingParams.bad_words",
            expected="at least one token that may be chosen",
        )
    biases = params.logit_bias or ()
    _check_ids("logit_bias", [token for token, _ in biases], vocab_size)
    base = np.full(parts.words, -1, np.int32)
    bits = np.zeros(parts.allowed_words * WORD_BITS, np.bool_)
    bits[:vocab_size] = allowed
    base[: parts.allowed_words] = np.packbits(bits, bitorder="little").view(np.int32)
    base[parts.biased : parts.biased + len(biases)] = [token for token, _ in biases]
    values = np.array([bias for _, bias in biases], np.float32)
    base[parts.biases : parts.biases + len(biases)] = values.view(np.int32)
    return LogitEdits(parts, base, tuple(word for word in words if len(word) > 1), not bool(allowed.all()))


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError if one of the token ids of the sampling parameter `name` is not in the vocabulary."""
    if ids and max(ids) >= vocab_size:
        raise RequestError(
            f"token id {max(ids)} in {name} is out of range",
            where=f"SamplingParams.{name}",
            expected=f"integers in [0, {vocab_size - 1}]",
        )


def _bad_words(words: Sequence[str], vocab_size: int, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Return the token sequences that may not be generated, for `words`, each once.

    As in vLLM, a word is also banned after a space if that gives as many tokens with another first one. Most tokenizers
    have tokens of their own for a word after a space.
    """
    found: dict[tuple[int, ...], None] = {}
    if words and tokenizer is None:
        raise RequestError(
            "bad_words for a model without a tokenizer",
            where="SamplingParams.bad_words",
            expected="no bad_words, or an artifact with a tokenizer",
            hint="logit_bias and allowed_token_ids take token ids",
        )
    for word in words:
        assert tokenizer is not None
        plain, spaced = (tuple(tokenizer.encode_plain(prefix + word.lstrip())) for prefix in ("", " "))
        if not plain:
            raise RequestError(
                f"the bad word {word!r:.40} has no tokens",
                where="SamplingParams.bad_words",
                expected="words of at least one token",
            )
        found[plain] = None
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found[spaced] = None
    _check_ids("bad_words", [token for word in found for token in word], vocab_size)
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words are {len(found)} token sequences, with and without a space before",
            where="SamplingParams.bad_words",
            expected=f"at most {MAX_BAD_WORDS}",
        )
    return list(found)
