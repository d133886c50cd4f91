"""Answers in Anthropic's form: a message, or the events of a stream, from `message_start` to `message_stop`."""

from typing import Literal

import msgspec

from ingot.serve.engine.messages import Delta
from ingot.serve.http.error_forms import messages_error
from ingot.serve.http.errors import HttpError
from ingot.serve.http.generation import Generation
from ingot.serve.http.typed_events import TypedAnswer, TypedEvent, typed_event


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """The text of a message, or its beginning: an empty text."""

    text: str
    citations: None = None


class MessageUsage(msgspec.Struct):
    """Anthropic's count of tokens. The prompt's tokens are those of `input_tokens` and of the two caches together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct, tag_field="type", tag="message"):
    """The assistant's message. `content` has one text, or nothing if the text is empty."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class _MessageStart(TypedEvent, tag="message_start"):
    message: MessageAnswer


class _BlockStart(TypedEvent, tag="content_block_start"):
    index: int
    content_block: TextBlock


class _TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class _BlockDelta(TypedEvent, tag="content_block_delta"):
    index: int
    delta: _TextDelta


class _BlockStop(TypedEvent, tag="content_block_stop"):
    index: int


class _End(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class _MessageDelta(TypedEvent, tag="message_delta"):
    delta: _End
    usage: MessageUsage


class _MessageStop(TypedEvent, tag="message_stop"):
    pass


class MessageWriter(TypedAnswer):
    """Writes the answer to a request: whole, or as events.

    message_id    the id of the message, and of the request for errors
    full_length   whether the model's length ends the output before the request's `max_tokens` does
    """

    def __init__(
        self, message_id: str, request_id: str, model_name: str, generation: Generation, *, full_length: bool
    ) -> None:
        self._id, self._request_id, self._model_name = message_id, request_id, model_name
        self._generation, self._full_length = generation, full_length
        self._begun = self._has_text = False
        self._last: Delta | None = None  # the delta that ended the sequence

    async def whole(self) -> MessageAnswer:
        """Wait for the end of the generation, and return the message."""
        text = ""
        async for _, deltas in self._generation:
            for delta in deltas:
                text += delta.text
                self._last = delta
        return self._message([TextBlock(text)] if text else [])

    def events(self, _index: int, deltas: list[Delta]) -> bytes:
        """Return the events for deltas: first `message_start`, and before the first text the start of its block."""
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            events.append(typed_event(_MessageStart(self._message([]))))
        for delta in deltas:
            if delta.text and not self._has_text:
                self._has_text = True
                events.append(typed_event(_BlockStart(0, TextBlock(""))))
            if delta.text:
                events.append(typed_event(_BlockDelta(0, _TextDelta(delta.text))))
            if delta.finish_reason is not None:
                self._last = delta
        return b"".join(events)

    def last_events(self) -> bytes:
        """Return the end of the text, the reason of the end, and `message_stop`. "" if the client has left."""
        if self._last is None:
            return b""
        end = typed_event(_MessageDelta(_End(*self._stop()), self._usage())) + typed_event(_MessageStop())
        return typed_event(_BlockStop(0)) + end if self._has_text else end

    def error_events(self, error: HttpError) -> bytes:
        """Return an error as the last event."""
        return b"event: error\ndata: " + messages_error(error, self._request_id) + b"\n\n"

    def _message(self, content: list[TextBlock]) -> MessageAnswer:
        return MessageAnswer(self._id, "assistant", self._model_name, content, *self._stop(), self._usage())

    def _usage(self) -> MessageUsage:
        generation = self._generation
        cached = generation.num_cached
        # Prompts are cached by themselves; no token counts as written to the cache, which has a price at Anthropic.
        return MessageUsage(generation.num_prompt_tokens - cached, 0, cached, generation.num_tokens)

    def _stop(self) -> tuple[str | None, str | None]:
        """Return the reason of the end, and the stop sequence that caused it. (None, None) before the end."""
        if self._last is None:
            return None, None
        if self._last.finish_reason == "length":
            return ("model_context_window_exceeded" if self._full_length else "max_tokens"), None
        found = self._last.stop_reason
        return ("stop_sequence", found) if isinstance(found, str) else ("end_turn", None)
