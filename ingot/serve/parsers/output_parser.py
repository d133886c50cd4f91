"""The parser of a message: reasoning first, then the calls in the content that remains."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ingot.serve.parsers.events import Content, Event, Parser, joined
from ingot.serve.parsers.harmony import MARKS, Harmony
from ingot.serve.parsers.machine import ToolMachine, Tools
from ingot.serve.parsers.reasoning import ReasoningForm, ReasoningMachine
from ingot.serve.parsers.tool_formats import ToolForm


@dataclass(frozen=True)
class PluggedIn:
    """A parser of another package. `make` is called for each message.

    A parser of tools gets the functions of the request, one of reasoning gets the text of the prompt.
    """

    make: Callable[[Any], Parser]


ToolChoice = ToolForm | PluggedIn
ReasoningChoice = ReasoningForm | PluggedIn | Literal["harmony"]


@dataclass(frozen=True)
class OutputFormat:
    """The formats of a model's messages; None: it has none."""

    tools: ToolChoice | None
    reasoning: ReasoningChoice | None

    @property
    def is_harmony(self) -> bool:
        """Return whether messages are in the format of gpt-oss."""
        return "harmony" in (self.tools, self.reasoning)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that parsers look for. Detokenizing must not leave them out."""
        forms = [form for form in (self.tools, self.reasoning) if not isinstance(form, str | PluggedIn | None)]
        return (*(mark for form in forms for mark in form.marks), *(MARKS if self.is_harmony else ()))

    def parser(self, tools: Tools, prompt: str, *, continues: bool = False) -> Parser | None:
        """Return a parser for one message; None if there is nothing to look for.

        tools       the functions that the model may call, by name
        prompt      the text of the prompt
        continues   the message continues the last one of the prompt
        """
        if self.is_harmony:
            return Harmony(reads_calls=bool(tools))
        calls = self._call_parser(tools) if tools else None
        openings = calls.openings.texts if isinstance(calls, ToolMachine) else ()
        reasoning: Parser | None = None
        if isinstance(self.reasoning, PluggedIn):
            reasoning = self.reasoning.make(prompt)
        elif isinstance(self.reasoning, ReasoningForm):
            begun = self.reasoning.begun_by(prompt, continues=continues)
            reasoning = ReasoningMachine(self.reasoning, begun=begun, openings=openings)
        if reasoning is None or calls is None:
            return reasoning or calls
        return _Both(reasoning, calls)

    def _call_parser(self, tools: Tools) -> Parser | None:
        if self.tools is None or isinstance(self.tools, str):
            return None
        return self.tools.make(tools) if isinstance(self.tools, PluggedIn) else self.tools.machine(tools)


class _Both:
    """Passes the content that a parser of reasoning finds to a parser of calls."""

    def __init__(self, reasoning: Parser, calls: Parser) -> None:
        self._reasoning, self._calls = reasoning, calls

    def feed(self, text: str) -> list[Event]:
        return joined(self._parsed(self._reasoning.feed(text)))

    def finish(self) -> list[Event]:
        return joined((*self._parsed(self._reasoning.finish()), *self._calls.finish()))

    def _parsed(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            yield from self._calls.feed(event.text) if isinstance(event, Content) else (event,)
