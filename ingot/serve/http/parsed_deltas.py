"""The parts of a chat message in the deltas of the engine: content, reasoning and tool calls, in OpenAI's form."""

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import msgspec

from ingot.serve.engine.messages import Delta
from ingot.serve.parsers.events import Arguments, CallBegun, CallEnded, Content, Event, Parser, Reasoning

_LETTERS = string.ascii_letters + string.digits


class DeltaFunction(msgspec.Struct, omit_defaults=True):
    """The new part of a call: the name at its begin, and then text of the arguments."""

    arguments: str
    name: str | None = None


class DeltaToolCall(msgspec.Struct, omit_defaults=True):
    """The new part of the tool call number `index`. The first part has the id."""

    index: int
    function: DeltaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class FunctionCall(msgspec.Struct):
    """A call of a function. `arguments` is the text of a JSON object, unless the call breaks off."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A whole tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class MessagePart(msgspec.Struct):
    """The new part of a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[DeltaToolCall] = msgspec.field(default_factory=list)

    def whole_calls(self) -> list[ToolCall]:
        """Return the calls of a part that is the whole message."""
        return [
            ToolCall(call.id or "", "function", FunctionCall(call.function.name or "", call.function.arguments))
            for call in self.calls
        ]


class ParsedMessage:
    """One message while it is generated.

    parser            finds reasoning and calls in it; None: all is content
    new_call_id       makes the id of a call that has none from the model
    with_reasoning    whether the client wants the reasoning
    several           whether the client wants more than one call
    parses            (attribute) whether there is a parser
    called            (attribute) whether a call has begun
    """

    def __init__(
        self, parser: Parser | None, new_call_id: Callable[[], str], *, with_reasoning: bool, several: bool
    ) -> None:
        self._parser, self._new_call_id = parser, new_call_id
        self._with_reasoning, self._several = with_reasoning, several
        self.parses = parser is not None
        self.called = False

    def part_of(self, delta: Delta) -> MessagePart:
        """Return what a delta adds to the message. Text that may become a marker comes with a later one."""
        part = MessagePart()
        for event in self.events_of(delta):
            _add(part, event)
        return part

    def events_of(self, delta: Delta) -> list[Event]:
        """Return what a delta adds to the message, in its order. Each call has an id."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        return list(self._wanted(events))

    def finish_reason(self, delta: Delta) -> str | None:
        """Return why the message has ended: "tool_calls" after a call, unless it was too long or failed."""
        return "tool_calls" if self.called and delta.finish_reason == "stop" else delta.finish_reason

    def _wanted(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            match event:
                case Reasoning() if not self._with_reasoning:
                    continue
                case CallBegun(index) | Arguments(index) | CallEnded(index) if index > 0 and not self._several:
                    continue
                case CallBegun(_, _, call_id):
                    self.called = True
                    yield replace(event, call_id=call_id or self._new_call_id())
                case _:
                    yield event


def _add(part: MessagePart, event: Event) -> None:
    match event:
        case Content(text):
            part.content += text
        case Reasoning(text):
            part.reasoning += text
        case CallBegun(index, name, call_id):
            part.calls.append(DeltaToolCall(index, DeltaFunction("", name), call_id, "function"))
        case Arguments(index, text):
            if not part.calls or part.calls[-1].index != index:
                part.calls.append(DeltaToolCall(index, DeltaFunction("")))
            part.calls[-1].function.arguments += text


def new_call_id() -> str:
    """Return an id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Return an id of nine letters and digits: the templates of Mistral's models take no other ones."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
