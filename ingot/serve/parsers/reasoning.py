"""Reasoning before the answer, as in `<think>REASONING</think>CONTENT`."""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.serve.parsers.machine import HeldEnd, Machine
from ingot.serve.parsers.source import Steps, markers


@dataclass(frozen=True)
class ReasoningForm:
    """How reasoning is marked. Newlines around the markers belong to neither part.

    begins        markers before the reasoning
    ends          markers after it
    begun         a message without a begin marker is reasoning up to an end marker, unless its prompt says otherwise
    anywhere      content may come before the reasoning
    answer        markers around the content after the reasoning; the model may leave them out
    before_answer a text that may come first in the content and is not part of it
    until_calls   the marker of a tool call also ends the reasoning
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    begun: bool = False
    anywhere: bool = False
    answer: tuple[str, str] | None = None
    before_answer: str = ""
    until_calls: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all texts of the format."""
        return (*self.begins, *self.ends, *(self.answer or ()))

    def begun_by(self, prompt: str, *, continues: bool) -> bool:
        """Return whether a message begins as reasoning after this prompt.

        continues   the message continues the last one of the prompt
        """
        end = prompt.rstrip()
        if not continues and end.endswith(self.begins):
            return True
        if not continues and not end.endswith((*self.ends, *(self.answer or ()))):
            return self.begun
        return max(map(prompt.rfind, self.begins)) > max(map(prompt.rfind, self.ends))


class ReasoningMachine(Machine):
    """Reads a message in the form of `ReasoningForm`.

    begun      whether it begins as reasoning, without a marker
    openings   the markers of tool calls
    """

    def __init__(self, form: ReasoningForm, *, begun: bool, openings: Sequence[str] = ()) -> None:
        self._form, self._begun = form, begun
        self._openings = tuple(openings) if form.until_calls else ()
        super().__init__()

    def run(self) -> Steps[None]:
        source, form = self.source, self._form
        begins = markers(*form.begins)
        source.keep()
        yield from source.blank()
        found = yield from source.literal(*form.begins)
        if found is None and not self._begun:
            self.emit_content(source.release())
            if form.anywhere and (found := (yield from source.until(begins, self.emit_content))) is not None:
                source.take(len(found))
        if found is not None or self._begun:
            source.release()
            yield from self._read_reasoning()
        yield from source.until(markers(), self.emit_content)

    def _read_reasoning(self) -> Steps[None]:
        """Read reasoning and its end, and the markers around the content after it."""
        source, form = self.source, self._form
        yield from self._skip_newlines()
        reasoning = HeldEnd(self.emit_reasoning, "\n")
        end = yield from source.until(markers(*form.ends, *self._openings), reasoning.push)
        if end is None:
            reasoning.flush()
            return
        if end in self._openings:
            return
        source.take(len(end))
        yield from self._skip_newlines()
        opened = form.answer is not None and (yield from source.literal(form.answer[0]))
        if opened:
            yield from self._skip_newlines()
        if form.before_answer and (yield from source.literal(form.before_answer)):
            yield from self._skip_newlines()
        if form.answer is not None and opened:
            content = HeldEnd(self.emit_content, "\n")
            if (end := (yield from source.until(markers(form.answer[1]), content.push))) is None:
                content.flush()
                return
            source.take(len(end))
            yield from self._skip_newlines()

    def _skip_newlines(self) -> Steps[None]:
        while (yield from self.source.peek()) == "\n":
            self.source.take(1)
