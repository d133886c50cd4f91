"""Encoding of rendered chats in which only the template, and no message, can produce control tokens."""

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import tokenizers

from ingot.ir.errors import InternalError, RequestError

Spans = Sequence[tuple[int, int]]


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `tokens`, and the longest one if several match. Without tokens, the pattern
    matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


class ControlTokens:
    """Encodes rendered chats. Control tokens such as `<|im_start|>` come only from the template, never from the text of
    a message.

    backend   the tokenizer of the tokenizers library
    tokens    control token -> id; each is an added token of the tokenizer
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Mapping[str, int]) -> None:
        self._backend = backend
        self.tokens = dict(tokens)
        self.pattern = pattern_of(tokens)
        self._ids = frozenset(tokens.values())
        self._unknown = _unknown_id(backend)
        added = backend.get_added_tokens_decoder()
        # A token that is matched after normalization has several spellings.
        self._respelled = backend.normalizer is not None and any(added[token].normalized for token in self._ids)

    def encode(self, text: str, content: Spans) -> list[int]:
        """Return the token ids of a rendered chat, without begin and end tokens.

        text      the rendered chat
        content   the spans [begin, end) of `text` that come from messages. Text in them never becomes a control token

        Raises RequestError if a message spells a control token that the tokenizer cannot encode in another way.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        inside = _mask(len(text), content)
        for token, (begin, end) in zip(ids, encoding.offsets, strict=True):
            if token in self._ids and any(inside[begin:end]):
                if token == self._unknown and not self.pattern.search(text, begin, end):
                    continue  # a character that the vocabulary lacks
                return self._encode_guarded(text, inside)
        return ids

    def holds(self, text: str) -> str | None:
        """Return the text of the first control token that encoding `text` would produce; None if it would produce
        none."""
        if match := self.pattern.search(text):
            return match[0]
        if not self._respelled:
            return None
        ids = self._backend.encode(text, add_special_tokens=False).ids
        made = next((token for token in ids if token in self._ids and token != self._unknown), None)
        return None if made is None else self._backend.id_to_token(made)

    def _encode_guarded(self, text: str, inside: bytearray) -> list[int]:
        """Return the token ids of a chat if a message contains the text of a control token. That text is encoded as
        ordinary text.

        text     the rendered chat
        inside   for each character 1 if it comes from a message, else 0

        In `text`, the template's control tokens are replaced by random names. A copy of the tokenizer knows control
        tokens only by these names. It encodes the result.
        """
        guarded, names, ids_of = self._guarded
        pieces: list[str] = []
        end = count = 0
        for begin, last in _outside(inside):
            for match in self.pattern.finditer(text, begin, last):
                pieces += text[end : match.start()], names[match[0]]
                end = match.end()
                count += 1
        made = guarded.encode("".join([*pieces, text[end:]]), add_special_tokens=False).ids
        ids = [ids_of.get(token, token) for token in made]
        # A control token's id that the tokenizer's model produced comes from plain text.
        forged = any(token in self._ids and token not in ids_of and token != self._unknown for token in made)
        if forged or sum(ids_of.get(token) in self._ids for token in made) != count:
            raise RequestError(
                "a message contains the text of a control token, which this tokenizer cannot tell from the token",
                where=", ".join(sorted({match[0] for match in self.pattern.finditer(text)})),
                expected="messages without control tokens",
            )
        return ids

    @cached_property
    def _guarded(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """Return a copy of the tokenizer in which control tokens have random names. No message can guess these names.

        Returns (the copy, control token -> its random name, added token's id in the copy -> its original id).
        """
        description = json.loads(self._backend.to_str())
        secret = secrets.token_hex(16)  # names that no message can guess
        names = {token: f"<{secret}:{index}>" for index, token in enumerate(self.tokens)}
        ids_of: dict[str, int] = {}
        for added in description["added_tokens"]:
            name = names.get(added["content"], added["content"])
            ids_of[name] = added["id"]
            added["content"] = name
        # The post-processor refers to control tokens by name, and adds tokens that are not wanted here.
        description["post_processor"] = None
        guarded = tokenizers.Tokenizer.from_str(json.dumps(description))
        renumbered = {made: ids_of[name] for name in ids_of if (made := guarded.token_to_id(name)) is not None}
        if len(renumbered) != len(ids_of):
            raise InternalError("the tokenizer lost an added token when its control tokens were renamed")
        return guarded, names, renumbered


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return the id of the token for characters outside the vocabulary; None if the tokenizer has no such token."""
    unknown: int | None = getattr(backend.model, "unk_id", None)  # of Unigram
    name = getattr(backend.model, "unk_token", None)  # of the others
    return unknown if name is None else backend.token_to_id(name)


def _mask(length: int, spans: Spans) -> bytearray:
    mask = bytearray(length)
    for begin, end in spans:
        mask[begin:end] = b"\x01" * (end - begin)
    return mask


def _outside(inside: bytearray) -> Collection[tuple[int, int]]:
    """Return the spans [begin, end) of characters that come from the template. `inside` has, for each character, 1 if
    it comes from a message, else 0."""
    return [match.span() for match in re.finditer(rb"\x00+", inside)]
