"""The parser of a message: reasoning first, then the calls in the content that remains."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ingot.serve.parsers.events import Content, Event, Parser, joined
from ingot.serve.parsers.harmony import MARKS, Harmony
from ingot.serve.parsers.json_calls import JsonForm
from ingot.serve.parsers.machine import ToolMachine
from ingot.serve.parsers.named_calls import NamedForm
from ingot.serve.parsers.reasoning import ReasoningForm, ReasoningMachine
from ingot.serve.parsers.tagged_calls import TaggedForm
from ingot.serve.parsers.tool_formats import ToolForm
from ingot.serve.parsers.tool_use import ToolUse
from ingot.serve.parsers.written_calls import Format

# Reads calls in the form of `written_calls.LISTED`.
_LISTED = JsonForm((), bare="[")


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

    def calls(self, use: ToolUse) -> list[Format]:
        """Return the formats of calls as the model writes them, to choose from; none if `writes` is False."""
        form, several = self.tools, use.several
        if isinstance(form, JsonForm | NamedForm):
            return [one.format(use.functions, several=several) for one in form.written]
        if isinstance(form, TaggedForm) and form.written is not None:
            found = form.written.format(use.functions, several=several)
            return [] if found is None else [found]
        return []

    def writes(self, use: ToolUse) -> bool:
        """Return whether there is a grammar of calls as the model writes them. There is none if the form is unknown, if
        it has a notation of its own for arguments, or if it cannot follow a schema of these functions."""
        return bool(self.tools.written if isinstance(self.tools, JsonForm | NamedForm) else self.calls(use))

    def parser(self, use: ToolUse, prompt: str, *, continues: bool = False) -> Parser | None:
        """Return a parser for one message; None if there is nothing to look for.

        use         the calls that it may have
        prompt      the text of the prompt
        continues   the message continues the last one of the prompt
        """
        if self.is_harmony:
            return Harmony(reads_calls=bool(use.functions))
        calls = self._call_parser(use) if use.functions else None
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

    def _call_parser(self, use: ToolUse) -> Parser | None:
        form, tools = self.tools, use.functions
        if use.forced and not self.writes(use):
            return _LISTED.machine(tools)
        if isinstance(form, TaggedForm):
            return form.machine(tools, exact=use.forced)
        if form is None or isinstance(form, str):
            return None
        return form.make(tools) if isinstance(form, PluggedIn) else form.machine(tools)


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
