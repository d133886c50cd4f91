"""The base of all machines: a parser whose steps read a `Source` and emit events."""

from abc import ABC, abstractmethod
from collections.abc import Generator

from ingot.serve.parsers.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning, joined
from ingot.serve.parsers.source import Malformed, Markers, Sink, Source, Steps


class Machine(ABC):
    """A parser for one message, written as the steps of `run`."""

    def __init__(self) -> None:
        self.source = Source()
        self._events: list[Event] = []
        self._call: int | None = None  # the index of the call that has begun and not ended
        self._calls = 0
        self._steps: Generator[None, None, None] = self.run()

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the text. Return what is certain now."""
        self.source.add(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Take the end of the text. Return the last events."""
        self.source.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return joined(events)

    @abstractmethod
    def run(self) -> Steps[None]:
        """Read the source to its end. It never raises."""

    def emit_content(self, text: str) -> None:
        """Emit text of the answer."""
        if text:
            self._events.append(Content(text))

    def emit_reasoning(self, text: str) -> None:
        """Emit text of the reasoning."""
        if text:
            self._events.append(Reasoning(text))

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Emit that a call has begun. The text that was kept is part of it, and so no content."""
        self.source.keep()
        self._call = self._calls
        self._calls += 1
        self._events.append(CallBegun(self._call, name, call_id))

    def emit_arguments(self, text: str) -> None:
        """Emit a part of the arguments of the call."""
        assert self._call is not None
        self._events.append(Arguments(self._call, text))
        self.source.keep()

    def end_call(self, *, complete: bool = True) -> None:
        """Emit that the call has ended. The text that is read from now on is kept, in case it is content."""
        assert self._call is not None
        self._events.append(CallEnded(self._call, complete))
        self._call = None
        self.source.keep()

    def attempt(self, steps: Steps[None], content: Sink) -> Steps[None]:
        """Take steps that read calls, from the text on that is kept.

        Text that is no call goes to `content`. A call that breaks off ends there, and the rest of its text is content,
        unless the message ends with it.
        """
        try:
            yield from steps
        except Malformed:
            if self._call is not None:
                rest = "" if self.source.exhausted else self.source.release()
                self.end_call(complete=False)
                content(rest)
        content(self.source.release())


class HeldEnd:
    """Passes text on, and holds back the characters at its end that may have to be dropped.

    characters   the characters to hold back; None: all white space
    """

    def __init__(self, emit: Sink, characters: str | None = None) -> None:
        self._emit, self._characters = emit, characters
        self._held: list[str] = []

    def push(self, text: str) -> None:
        """Pass text on, without its end."""
        kept = text.rstrip(self._characters)
        if kept:
            self._emit("".join((*self._held, kept)))
            self._held = []
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def flush(self, without: str = "") -> None:
        """Pass on what is held back, without this text at its end."""
        self._emit("".join(self._held).removesuffix(without))
        self._held = []

    def drop(self) -> None:
        """Drop what is held back."""
        self._held = []


class ToolMachine(Machine):
    """A machine for content with calls in it. A subclass says where calls may begin, and reads them.

    White space before and after calls is dropped.

    openings    the markers before calls
    at_begin    calls may also begin without a marker, at the begin of the message
    """

    openings: Markers
    at_begin: bool = False

    def __init__(self) -> None:
        self._content = HeldEnd(self._emit_text)
        self._only_blank = False  # since the end of a call
        super().__init__()

    @abstractmethod
    def read_calls(self, opening: str) -> Steps[None]:
        """Read calls after the marker `opening`, or "" at the begin of the message. Raises Malformed.

        After each call, text that belongs to the format is read and then left to `source.keep`."""

    def run(self) -> Steps[None]:
        if self.at_begin:
            self.source.keep()
            if (yield from self.source.blank()):
                yield from self.attempt(self.read_calls(""), self._content.push)
            else:
                self._content.push(self.source.release())
        while (opening := (yield from self.source.until(self.openings, self._content.push))) is not None:
            self.source.keep()
            self.source.take(len(opening))
            yield from self.attempt(self.read_calls(opening), self._content.push)
        if self._only_blank:
            self._content.drop()
        self._content.flush()

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self._content.drop()
        super().begin_call(name, call_id)

    def end_call(self, *, complete: bool = True) -> None:
        self._only_blank = True
        super().end_call(complete=complete)

    def _emit_text(self, text: str) -> None:
        if text:
            self._only_blank = False
        self.emit_content(text)
