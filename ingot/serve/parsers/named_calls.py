"""Calls with the name before the arguments, as in `<begin>NAME<arguments>{…}<end>`."""

from collections.abc import Callable
from dataclasses import dataclass

from ingot.serve.parsers.json_calls import JsonForm, read_json_calls
from ingot.serve.parsers.machine import ToolMachine
from ingot.serve.parsers.names import MAX_NAME, is_name, plain_header
from ingot.serve.parsers.source import Malformed, Steps, markers
from ingot.serve.parsers.tool_use import Tools
from ingot.serve.parsers.values import JSON, Notation, read_value
from ingot.serve.parsers.written_calls import WrittenCalls


@dataclass(frozen=True)
class NamedForm:
    """How calls with a name before their arguments are written.

    opening    the marker before a call; "": a call begins the message, and its name is one of the request's tools
    name_ends  texts that end the header; one that begins with a bracket belongs to the arguments
    tail       texts after the arguments, in this order; the model may leave them out
    section    the markers around all calls
    header     returns the name and the id that a header has
    notation   of the arguments
    objects    calls may also be written in this form, after the same opening
    written    how models write calls; none: their arguments are not JSON
    """

    opening: str
    name_ends: tuple[str, ...]
    tail: tuple[str, ...] = ()
    section: tuple[str, str] | None = None
    header: Callable[[str], tuple[str, str | None]] = plain_header
    notation: Notation = JSON
    objects: JsonForm | None = None
    written: tuple[WrittenCalls, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all texts of the format."""
        return tuple(filter(None, (self.opening, *self.name_ends, *self.tail, *(self.section or ()))))

    def machine(self, tools: Tools) -> ToolMachine:
        """Return a machine for one message of a request with these tools."""
        return NamedCalls(self, tuple(tools))


class NamedCalls(ToolMachine):
    """Reads calls in the form of `NamedForm`."""

    def __init__(self, form: NamedForm, tool_names: tuple[str, ...]) -> None:
        self._form = form
        self._names = tuple(f"{name}{form.name_ends[0]}" for name in tool_names)
        self._section_begin, self._section_end = form.section or ("", "")
        self.openings = markers(*filter(None, (form.opening, self._section_begin)))
        self.at_begin = not form.opening
        super().__init__()

    def read_calls(self, opening: str) -> Steps[None]:
        source, form = self.source, self._form
        if opening != form.opening:
            yield from source.blank()
            if not (yield from source.literal(form.opening)):
                raise Malformed
        if form.objects is not None and (yield from source.blank()) in ("[", "{"):
            yield from read_json_calls(self, form.objects)
            return
        while True:
            yield from self._read_call()
            for text in form.tail:
                yield from source.blank()
                yield from source.literal(text)
            source.keep()
            yield from source.blank()
            if self._section_end and (yield from source.literal(self._section_end)):
                source.keep()
                return
            if form.opening and not (yield from source.literal(form.opening)):
                raise Malformed

    def _read_call(self) -> Steps[None]:
        source, form = self.source, self._form
        name, call_id = form.header((yield from self._header()))
        if not is_name(name) or (yield from source.blank()) != "{":
            raise Malformed
        self.begin_call(name, call_id)
        yield from read_value(source, form.notation, self.emit_arguments)
        self.end_call()

    def _header(self) -> Steps[str]:
        if not self._form.opening:
            found = yield from self.source.literal(*self._names)
            if found is None:
                raise Malformed
            return found.removesuffix(self._form.name_ends[0])
        header, end = yield from self.source.short(markers(*self._form.name_ends, *self.openings.texts), MAX_NAME)
        if end in self.openings.texts:  # the marker before was text, and the call begins here
            raise Malformed
        if not end.startswith("{"):
            self.source.take(len(end))
        return header
