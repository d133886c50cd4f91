"""The items of a response's output, one after the other, and the events that tell of them."""

import secrets
from collections.abc import Callable
from typing import Any, Literal

from ingot.runtime.chat.messages import Message
from ingot.serve.http.logprobs import ChatTokenLogprob
from ingot.serve.http.responses_api.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from ingot.serve.http.responses_api.objects import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from ingot.serve.parsers.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning

# OpenAI's ids are as long.
_ID_BYTES = 24
Emit = Callable[..., bytes]
Status = Literal["completed", "incomplete"]


class OutputItems:
    """Collects what a parser finds as items.

    emit    makes an event from its class and its fields
    items   (attribute) all items; the last one may be open
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.items: list[OutputItem] = []
        self._open = False  # whether the last item is
        self._pieces: list[str] = []  # of the last item's text
        self._logprobs: list[ChatTokenLogprob] = []

    def take(self, event: Event, logprobs: list[ChatTokenLogprob]) -> list[bytes]:
        """Add what an event says. `logprobs` are those of its text. Return the events of the response."""
        match event:
            case Content(text):
                events = self.open_message()
                self._logprobs += logprobs
                return [*events, self._added(TextDelta, text, logprobs=logprobs)]
            case Reasoning(text):
                return [*self._open_reasoning(), self._added(ReasoningDelta, text)]
            case CallBegun(_, name, call_id):
                item = FunctionCallItem(_new_id("fc"), "in_progress", call_id or "", name, "")
                return [*self.close(), *self._begin(item)]
            case Arguments(_, text):
                return [self._added(ArgumentsDelta, text, content=False)]
            case CallEnded(_, complete):
                return self.close("completed" if complete else "incomplete")

    def open_message(self) -> list[bytes]:
        """Begin a message, unless the last item is one that is open."""
        if self._open and isinstance(self.items[-1], OutputMessage):
            return []
        message = OutputMessage(_new_id("msg"), "in_progress", [])
        events = [*self.close(), *self._begin(message)]
        return [*events, self._emit(PartAdded, **self._place(), part=OutputText("", []))]

    def _open_reasoning(self) -> list[bytes]:
        if self._open and isinstance(self.items[-1], ReasoningItem):
            return []
        events = [*self.close(), *self._begin(ReasoningItem(_new_id("rs"), "in_progress", []))]
        return [*events, self._emit(PartAdded, **self._place(), part=ReasoningText(""))]

    def close(self, status: Status = "completed") -> list[bytes]:
        """End the open item, if there is one."""
        if not self._open:
            return []
        item, text = self.items[-1], "".join(self._pieces)
        item.status = status
        match item:
            case OutputMessage():
                part = OutputText(text, self._logprobs)
                item.content = [part]
                events = [
                    self._emit(TextDone, **self._place(), text=text, logprobs=self._logprobs),
                    self._emit(PartDone, **self._place(), part=part),
                ]
            case ReasoningItem():
                item.content = [ReasoningText(text)]
                events = [
                    self._emit(ReasoningDone, **self._place(), text=text),
                    self._emit(PartDone, **self._place(), part=item.content[0]),
                ]
            case FunctionCallItem():
                item.arguments = text
                place = self._place(content=False)
                events = [self._emit(ArgumentsDone, **place, name=item.name, arguments=text)]
        self._open = False
        return [*events, self._emit(ItemDone, output_index=len(self.items) - 1, item=item)]

    def as_message(self) -> Message:
        """Return the items as the assistant's message of a chat, without calls that break off."""
        message: Message = {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        for item in self.items:
            match item:
                case OutputMessage():
                    message["content"] += "".join(part.text for part in item.content)
                case ReasoningItem():
                    text = "".join(part.text for part in item.content)
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case FunctionCallItem() if item.status == "completed":
                    function = {"name": item.name, "arguments": item.arguments}
                    calls.append({"id": item.call_id, "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        return message

    def _begin(self, item: OutputItem) -> list[bytes]:
        self.items.append(item)
        self._open, self._pieces, self._logprobs = True, [], []
        return [self._emit(ItemAdded, output_index=len(self.items) - 1, item=item)]

    def _added(self, kind: type, text: str, *, content: bool = True, **fields: object) -> bytes:
        self._pieces.append(text)
        return self._emit(kind, **self._place(content=content), delta=text, **fields)

    def _place(self, *, content: bool = True) -> dict[str, object]:
        """Return the fields that say to which item, and to which text of it, an event belongs."""
        place: dict[str, object] = {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if content else place


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(_ID_BYTES)}"
