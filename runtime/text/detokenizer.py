"""Incremental detokenization: token ids to text, one token at a time, in linear time."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.text.stop_strings import StopMatcher, StopStrings
from ingot.runtime.text.tokenizer import REPLACEMENT

CONTEXT_TOKENS = 5  # last prompt tokens; vLLM's INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET
MAX_PENDING = 8  # tokens; a character has at most 4 bytes, so more than 3 pending tokens are broken bytes


class Decoder(Protocol):
    """The methods of `Tokenizer` that a TokenDecoder calls."""

    added_tokens: Mapping[int, str]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool: ...

    def decode_alone(self, token_id: int, skip_special_tokens: bool) -> str: ...

    def text_of(self, token_id: int, skip_special_tokens: bool) -> str | None: ...


class TokenDecoder:
    """Decodes tokens as they arrive, and returns the text that each new token adds.

    tokenizer                       the tokenizer
    context                         the tokens before the first one, such as the prompt's; ignored if they end inside a
                                    character
    skip_special_tokens             special tokens have no text
    spaces_between_special_tokens   False: no space is written between two special tokens

    A token may end inside a character. Its text is then held back until the character is complete. In some tokenizers,
    text also depends on the tokens before, such as a leading space. So a token is decoded together with the tokens
    before it.

    With a byte-level tokenizer, the returned texts add up to `decode` of all tokens. With byte fallback, they do so for
    valid UTF-8.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._context = [
            token for token in context[-CONTEXT_TOKENS:] if tokenizer.is_visible(token, skip_special_tokens)
        ]
        self._context_text = self._decode(self._context)
        if self._context_text.endswith(REPLACEMENT):
            self._context, self._context_text = [], ""
        self._pending: list[int] = []
        self._after_added = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is complete now. This is usually the token's text, or "" if the token
        ends inside a character."""
        if self._spaces and not self._pending:
            text_of = self._tokenizer.text_of(token_id, self._skip)
            if text_of is not None:
                if text_of:
                    self._context, self._context_text = [token_id], text_of
                return text_of
        if not self._tokenizer.is_visible(token_id, self._skip):
            return ""
        if not self._spaces:
            after_added, self._after_added = self._after_added, token_id in self._tokenizer.added_tokens
            if after_added and self._after_added:
                text = self.finish() + self._tokenizer.added_tokens[token_id]
                self._settle([token_id], [])
                return text
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if len(text) > len(self._context_text) and not text.endswith(REPLACEMENT):
            return self._give_out(text, len(self._pending))
        if len(self._pending) > MAX_PENDING:
            return self._give_out_broken(text)
        return ""

    def finish(self) -> str:
        """End the tokens, and return the text that was held back. An incomplete character becomes U+FFFD."""
        if not self._pending:
            return ""
        return self._give_out(self._decode(self._context + self._pending), len(self._pending))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _settle(self, context: list[int], pending: list[int]) -> None:
        self._context, self._pending = context, pending
        one = len(context) == 1  # the usual case
        self._context_text = self._tokenizer.decode_alone(context[0], self._skip) if one else self._decode(context)

    def _give_out(self, text: str, count: int) -> str:
        """Return the part of `text` that was not returned before. `text` is the decoded text of the context tokens and
        of the first `count` pending tokens (tokens whose text is held back). These pending tokens then become the
        context of later tokens."""
        new = text[len(self._context_text) :]
        self._settle(self._pending[:count], self._pending[count:])
        return new

    def _give_out_broken(self, text: str) -> str:
        # This keeps a long run of broken bytes from being decoded again and again. Split the pending tokens where the
        # texts of both parts concatenate to the whole text: no character is split there. Among four token ends there is
        # such a place.
        for count in range(len(self._pending) - 1, 0, -1):
            first = self._decode(self._context + self._pending[:count])
            if first + self._decode(self._pending[count:]) == text:
                return self._give_out(first, count)
        return self._give_out(
            text, len(self._pending)
        )  # not a byte-level decoder: accept a wrong space to avoid quadratic time


class Detokenizer:
    """Turns the tokens of one sequence into text as they arrive, and finds stop strings in it.

    tokenizer    the tokenizer
    params       the request's parameters for text and stop strings
    prompt_ids   the tokens of the prompt
    stops        finds `params.stop`; the sequences of a request share one. None: make one
    text         (attribute) the text so far. Incomplete characters, and text that may become a stop string, are held
                 back
    matched      (attribute) the stop string that was found, or None
    """

    def __init__(
        self, tokenizer: Decoder, params: SamplingParams, prompt_ids: Sequence[int], stops: StopStrings | None = None
    ) -> None:
        self._decoder = TokenDecoder(
            tokenizer,
            prompt_ids[-CONTEXT_TOKENS:],
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        if stops is None and params.stop:
            stops = StopStrings(params.stop)
        self._matcher = None if stops is None else StopMatcher(stops, params.include_stop_str_in_output)
        self._unstoppable = params.min_tokens  # tokens to come at which stop strings do not count yet
        self.text = ""

    @property
    def matched(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def push(self, token_id: int) -> None:
        """Add a token, and update `text` and `matched`."""
        self._add(self._decoder.push(token_id))
        self._unstoppable = max(0, self._unstoppable - 1)

    def finish(self) -> None:
        """End the sequence: add the text that was held back to `text`."""
        self._add(self._decoder.finish())
        if self._matcher is not None:
            self.text += self._matcher.finish()

    def _add(self, text: str) -> None:
        self.text += text if self._matcher is None else self._matcher.push(text, stop=not self._unstoppable)
