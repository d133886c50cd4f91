"""The events that a parser returns for generated text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call has begun.

    index     0 for the first call of the message, and so on
    name      the name of the function
    call_id   the id that the model gave the call; None: the server chooses one
    """

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A tool call has ended. `complete` is False if its arguments break off, so that they are no JSON object."""

    index: int
    complete: bool = True


Event = Content | Reasoning | CallBegun | Arguments | CallEnded


class Parser(Protocol):
    """Turns the text of one message into events. It is made for one message and takes the text in pieces.

    The pieces do not matter: the joined events are those of the whole text.
    """

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the text. Return what is certain now."""

    def finish(self) -> list[Event]:
        """Take the end of the text. Return the last events."""


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbouring texts of the same kind, and of the same call, joined."""
    result: list[Event] = []
    pieces: list[str] = []  # the texts of the last event of `result`, joined once
    for event in events:
        last = result[-1] if result else None
        same = isinstance(event, Content | Reasoning | Arguments) and type(event) is type(last)
        if same and not (isinstance(event, Arguments) and isinstance(last, Arguments) and event.index != last.index):
            pieces.append(event.text)  # type: ignore[union-attr]
            continue
        _close(result, pieces)
        result.append(event)
    _close(result, pieces)
    return result


def _close(events: list[Event], pieces: list[str]) -> None:
    """Add the texts in `pieces` to the last event, and empty `pieces`."""
    if not pieces:
        return
    match events[-1]:
        case Content(text):
            events[-1] = Content("".join((text, *pieces)))
        case Reasoning(text):
            events[-1] = Reasoning("".join((text, *pieces)))
        case Arguments(index, text):
            events[-1] = Arguments(index, "".join((text, *pieces)))
    pieces.clear()
