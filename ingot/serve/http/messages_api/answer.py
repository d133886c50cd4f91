"""Answers in Anthropic's form: a message, or the events of a stream, from `message_start` to `message_stop`."""

import json
from typing import Any, Literal

import msgspec

from ingot.serve.engine.messages import Delta
from ingot.serve.http.error_forms import messages_error
from ingot.serve.http.errors import HttpError
from ingot.serve.http.generation import Generation
from ingot.serve.http.parsed_deltas import ParsedMessage
from ingot.serve.http.typed_events import TypedAnswer, TypedEvent, typed_event
from ingot.serve.parsers.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning, joined


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """The text of a message, or its beginning: an empty text."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of the model. Nothing is signed: clients may send it back, and need not."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool. Without a complete object of arguments, `input` is empty."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """Anthropic's count of tokens. The prompt's tokens are those of `input_tokens` and of the two caches together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct, tag_field="type", tag="message"):
    """The assistant's message. `content` has its text, reasoning and calls in their order, without empty ones."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class _MessageStart(TypedEvent, tag="message_start"):
    message: MessageAnswer


class _BlockStart(TypedEvent, tag="content_block_start"):
    index: int
    content_block: Block


class _TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class _ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class _InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class _BlockDelta(TypedEvent, tag="content_block_delta"):
    index: int
    delta: _TextDelta | _ThinkingDelta | _InputDelta


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
    message       separates the text, the reasoning and the calls
    full_length   whether the model's length ends the output before the request's `max_tokens` does
    """

    def __init__(
        self,
        message_id: str,
        request_id: str,
        model_name: str,
        generation: Generation,
        message: ParsedMessage,
        *,
        full_length: bool,
    ) -> None:
        self._id, self._request_id, self._model_name = message_id, request_id, model_name
        self._generation, self._full_length = generation, full_length
        self._parsed = message
        self._begun = False
        self._blocks = 0  # that have begun
        self._open: type[Block] | None = None  # the kind of the last block, while it is open
        self._last: Delta | None = None  # the delta that ended the sequence

    async def whole(self) -> MessageAnswer:
        """Wait for the end of the generation, and return the message."""
        events: list[Event] = []
        async for _, deltas in self._generation:
            for delta in deltas:
                events += self._parsed.events_of(delta)
                self._last = delta
        return self._message(_blocks_of(events))

    def events(self, _index: int, deltas: list[Delta]) -> bytes:
        """Return the events for deltas: first `message_start`, and before the first text the start of its block."""
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            events.append(typed_event(_MessageStart(self._message([]))))
        for delta in deltas:
            for event in self._parsed.events_of(delta):
                events += self._block_events(event)
            if delta.finish_reason is not None:
                self._last = delta
        return b"".join(events)

    def last_events(self) -> bytes:
        """Return the end of the text, the reason of the end, and `message_stop`. "" if the client has left."""
        if self._last is None:
            return b""
        end = typed_event(_MessageDelta(_End(*self._stop()), self._usage())) + typed_event(_MessageStop())
        return b"".join((*self._closed(), end))

    def error_events(self, error: HttpError) -> bytes:
        """Return an error as the last event."""
        return b"event: error\ndata: " + messages_error(error, self._request_id) + b"\n\n"

    def _block_events(self, event: Event) -> list[bytes]:
        """Return the events for a part of the message: the end of the block before, the begin of its own, its text."""
        match event:
            case Content(text):
                return [*self._opened(TextBlock("")), self._block_delta(_TextDelta(text))]
            case Reasoning(text):
                return [*self._opened(ThinkingBlock("")), self._block_delta(_ThinkingDelta(text))]
            case CallBegun(_, name, call_id):
                return [*self._closed(), *self._opened(ToolUseBlock(call_id or "", name, {}))]
            case Arguments(_, text):
                return [self._block_delta(_InputDelta(text))]
            case _:
                return self._closed()

    def _opened(self, block: Block) -> list[bytes]:
        if self._open is type(block):
            return []
        events = self._closed()
        self._open = type(block)
        self._blocks += 1
        return [*events, typed_event(_BlockStart(self._blocks - 1, block))]

    def _closed(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [typed_event(_BlockStop(self._blocks - 1))]

    def _block_delta(self, delta: _TextDelta | _ThinkingDelta | _InputDelta) -> bytes:
        return typed_event(_BlockDelta(self._blocks - 1, delta))

    def _message(self, content: list[Block]) -> MessageAnswer:
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
        if self._parsed.finish_reason(self._last) == "tool_calls":
            return "tool_use", None
        found = self._last.stop_reason
        return ("stop_sequence", found) if isinstance(found, str) else ("end_turn", None)


def _blocks_of(events: list[Event]) -> list[Block]:
    """Return the blocks of a whole message."""
    blocks: list[Block] = []
    arguments = ""
    for event in joined(events):
        match event:
            case Content(text):
                blocks.append(TextBlock(text))
            case Reasoning(text):
                blocks.append(ThinkingBlock(text))
            case CallBegun(_, name, call_id):
                blocks.append(ToolUseBlock(call_id or "", name, {}))
            case Arguments(_, text):
                arguments = text
            case CallEnded(_, complete) if complete and isinstance(blocks[-1], ToolUseBlock):
                blocks[-1].input = json.loads(arguments)
    return blocks
