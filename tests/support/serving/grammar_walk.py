"""Random texts of a grammar, over a tokenizer with one token a byte and the special tokens of a format."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers

from ingot.runtime.grammar.answer_format import grammar_with
from ingot.runtime.grammar.compiling import compiled, make_tokenizer, mask_of
from ingot.runtime.grammar.params import StructuredOutputsParams
from ingot.runtime.grammar.source import source_of

_ENDS = frozenset('"}]<')
_CLOSES = "/"  # a tag, where a new one could begin as well
_FEW = 4  # tokens that are possible there, not in text


class GrammarWalk:
    """Follows grammars.

    marks   the special tokens; each is one token, and never text
    """

    def __init__(self, marks: Collection[str] = ()) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({one: at for at, one in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<eos>", *marks])
        self._eos = backend.token_to_id("<eos>")
        self.special = {mark: backend.token_to_id(mark) for mark in ("<eos>", *marks)}
        self._backend = backend
        self._tokenizer = make_tokenizer(backend.to_str(), backend.get_vocab_size(), [self._eos])
        self._ends = {backend.token_to_id(one) for one in _ENDS}
        self._closes = backend.token_to_id(_CLOSES)

    def matcher(self, form: dict[str, Any]) -> Any:
        """A matcher at the start of a format. RequestError if it is refused."""
        params = StructuredOutputsParams(**grammar_with(None, form))
        return compiled(self._tokenizer, source_of(params, self.special))

    def text(self, form: dict[str, Any], draw: random.Random, begin: str = "", most: int = 3000) -> str:
        """A random text of a format after `begin`. It prefers what ends a value, so that it ends soon. In the second
        half of `most` tokens it takes what ends a value or closes a list of tags wherever it can."""
        matcher, ids = self.matcher(form), self._ids(begin)
        assert matcher.try_consume_tokens(ids) == len(ids), begin
        for number in range(most):
            late = number >= most // 2
            mask = mask_of(self._tokenizer, matcher)
            found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            if self._eos in found or not found:
                if not found or len(found) == 1 or late or draw.random() < 0.5:
                    return self.decoded(ids)
                found.remove(self._eos)
            ends = [one for one in found if one in self._ends or one >= 256]
            if late and self._closes in found and len(found) <= _FEW:
                ends = [self._closes]
            ids.append(draw.choice(ends if ends and (late or draw.random() < 0.4) else found))
            assert matcher.consume_token(ids[-1]), matcher.get_error()
        raise AssertionError(f"no end: {self.decoded(ids)}")

    def accepts(self, form: dict[str, Any], text: str) -> bool:
        """Whether a text is one of a format."""
        matcher, ids = self.matcher(form), self._ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decoded(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)
