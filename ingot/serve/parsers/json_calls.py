"""Calls as JSON: `{"name": …, "arguments": {…}}`, one or several, or a list of them, between markers or alone."""

import json
from dataclasses import dataclass

from ingot.serve.parsers.machine import ToolMachine
from ingot.serve.parsers.names import read_name
from ingot.serve.parsers.source import Malformed, Source, Steps, markers
from ingot.serve.parsers.tool_use import Tools
from ingot.serve.parsers.values import JSON, read_text, read_value, read_whole
from ingot.serve.parsers.written_calls import WrittenCalls

_ARGUMENTS = ("arguments", "parameters")  # Llama's models write the second one
# The fields of calls, without those that are an argument's. Other JSON at the begin of a message is an answer in JSON.
_FIELDS = ("name", *_ARGUMENTS, "id", "type")


@dataclass(frozen=True)
class JsonForm:
    """The places of calls in JSON.

    openings       markers before them
    closings       markers after them; the model may leave them out
    words          words that may come between the opening and the first call, in this order
    bare           brackets with which calls may begin a message that has no marker
    need_arguments a call without arguments is content, not a call
    written        how models write calls
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    bare: str = ""
    need_arguments: bool = True
    written: tuple[WrittenCalls, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all texts of the format."""
        return (*self.openings, *self.closings, *self.words)

    def machine(self, _tools: Tools) -> ToolMachine:
        """Return a machine for one message."""
        return JsonCalls(self)


class JsonCalls(ToolMachine):
    """Reads calls in the form of `JsonForm`."""

    def __init__(self, form: JsonForm) -> None:
        self._form = form
        self.openings = markers(*form.openings)
        self.at_begin = bool(form.bare)
        super().__init__()

    def read_calls(self, opening: str) -> Steps[None]:
        source = self.source
        for word in self._form.words:
            yield from source.blank()
            yield from source.literal(word)
        if not opening and (yield from source.blank()) not in self._form.bare:
            raise Malformed
        yield from read_json_calls(self, self._form, bare=not opening)


def read_json_calls(machine: ToolMachine, form: JsonForm, *, bare: bool = False) -> Steps[None]:
    """Read objects and lists of objects, up to a closing marker or other text. `bare`: they have no marker before them.

    Raises Malformed for other text; calls before it remain."""
    source = machine.source
    char = yield from source.blank()
    while True:
        if char == "{":
            yield from _read_call(machine, form, bare=bare)
        elif char == "[":
            yield from _read_list(machine, form, bare=bare)
        else:
            raise Malformed
        source.keep()
        char = yield from source.blank()
        if form.closings and (yield from source.literal(*form.closings)):
            source.keep()
            return
        if char in (",", ";"):  # Llama's models separate calls with semicolons
            source.take(1)
            char = yield from source.blank()


def _read_list(machine: ToolMachine, form: JsonForm, *, bare: bool) -> Steps[None]:
    source = machine.source
    source.take(1)
    char = yield from source.blank()
    if char == "]" and not bare:
        source.take(1)
        return
    while True:
        if char != "{":
            raise Malformed
        yield from _read_call(machine, form, bare=bare)
        source.keep()
        char = yield from source.blank()
        if char not in (",", "]"):
            raise Malformed
        source.take(1)
        if char == "]":
            return
        char = yield from source.blank()


def _read_call(machine: ToolMachine, form: JsonForm, *, bare: bool) -> Steps[None]:
    """Read one object. The call begins when its name is known and its arguments begin, so other objects are content."""
    source = machine.source
    name: str | None = None
    arguments: str | None = None  # those that came before the name, or as text
    done = False
    char = ","
    while char == ",":
        source.take(1)
        key = yield from _read_key(source, bare=bare)
        if (yield from source.blank()) != ":":
            raise Malformed
        source.take(1)
        char = yield from source.blank()
        if key == "name" and name is None:
            name = yield from read_name(source)
        elif key in _ARGUMENTS and arguments is None and not done:
            if name is not None and char == "{":
                machine.begin_call(name)
                yield from read_value(source, JSON, machine.emit_arguments)
                machine.end_call()
                done = True
            else:
                arguments = _object((yield from read_whole(source, JSON)))
        else:
            yield from read_value(source, JSON, _drop)
        char = yield from source.blank()
    if char != "}" or (not done and (name is None or (arguments is None and form.need_arguments))):
        raise Malformed
    source.take(1)
    if not done:
        assert name is not None
        machine.begin_call(name)
        machine.emit_arguments(arguments or "{}")
        machine.end_call()


def _read_key(source: Source, *, bare: bool) -> Steps[str]:
    """Read the name of a field. In an object without a marker before it, other fields than those of calls are wrong at
    their first character: the object is an answer in JSON, which need not wait."""
    if (yield from source.blank()) != '"':
        raise Malformed
    if not bare:
        return (yield from read_text(source, JSON))
    found = yield from source.literal(*(f'"{name}"' for name in _FIELDS))
    if found is None:
        raise Malformed
    return found.strip('"')


def _object(text: str) -> str:
    """Return arguments as the text of a JSON object. Models may write it as a string, and null for no arguments."""
    if text.startswith("{"):
        return text
    value = json.loads(text)
    if value is None:
        return "{}"
    try:
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise Malformed


def _drop(_piece: str) -> None:
    pass
