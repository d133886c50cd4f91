"""Calls in tags, as in `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

A value is plain text, and the tool's schema says what it is. A value that must be a string is emitted while it arrives;
others are converted when they are complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.serve.parsers.machine import HeldEnd, ToolMachine
from ingot.serve.parsers.names import MAX_NAME, is_name
from ingot.serve.parsers.schema_types import STRING, ArgumentTypes, Types, json_of
from ingot.serve.parsers.source import Malformed, Steps, markers
from ingot.serve.parsers.tool_use import Tools
from ingot.serve.parsers.values import escaped
from ingot.serve.parsers.written_tags import WrittenTags


@dataclass(frozen=True)
class TaggedForm:
    """How calls in tags are written.

    call        the texts before a call's name and after its last argument
    name_end    the text after the name. The name also ends where the first argument or the end of the call begins
    parameter   the texts before an argument's name and after its value
    key_ends    the texts after an argument's name, and the types of its value; None: those of the schema
    value_begin a text between the end of the name and the value
    section     the markers around all calls; the model may leave them out
    lead        texts before `call` inside the section, in this order; the model may leave them out
    tail        texts after a call, likewise
    lines       the value is on lines of its own, so a newline at its begin and its end is not part of it
    written     how models write calls; None: unknown
    """

    call: tuple[str, str]
    name_end: str
    parameter: tuple[str, str]
    key_ends: Mapping[str, Types | None]
    value_begin: str = ""
    section: tuple[str, str] | None = None
    lead: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    lines: bool = False
    written: WrittenTags | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all texts of the format."""
        texts = (*self.call, self.name_end, *self.parameter, self.value_begin, *(self.section or ()))
        return tuple(filter(None, (*texts, *self.lead, *self.tail)))

    def machine(self, tools: Tools, *, exact: bool = False) -> ToolMachine:
        """Return a machine for one message of a request with these tools. `exact`: a grammar makes sure that each value
        has the text at its end, so texts of other tags are part of it."""
        return TaggedCalls(self, tools, exact=exact)


class TaggedCalls(ToolMachine):
    """Reads calls in the form of `TaggedForm`."""

    def __init__(self, form: TaggedForm, tools: Tools, *, exact: bool) -> None:
        self._form, self._tools = form, tools
        ends = (form.parameter[1],) if exact else (form.parameter[1], form.parameter[0], form.call[1])
        self._value_ends = markers(*ends)
        section = form.section[0] if form.section else ""
        self.openings = markers(*dict.fromkeys(filter(None, (section, form.call[0]))))
        super().__init__()

    def read_calls(self, opening: str) -> Steps[None]:
        source, form = self.source, self._form
        begun = opening == form.call[0]
        while True:
            if not begun:
                yield from self._read_texts(form.lead)
                if not (yield from source.literal(form.call[0])):
                    raise Malformed
            yield from self._read_call()
            yield from self._read_texts(form.tail)
            if form.section is not None and (yield from source.literal(form.section[1])):
                source.keep()
                return
            begun = False

    def _read_texts(self, texts: tuple[str, ...]) -> Steps[None]:
        """Read texts that may be there, and white space around them."""
        source = self.source
        for text in texts:
            yield from source.blank()
            if (yield from source.literal(text)) and text in self._form.tail:
                source.keep()
        yield from source.blank()

    def _read_call(self) -> Steps[None]:
        source, form = self.source, self._form
        stops = (form.parameter[0], form.call[1])
        openings = self.openings.texts
        name, end = yield from source.short(markers(form.name_end, *stops, *openings), MAX_NAME)
        if end in openings:  # the text before was no call, and the call begins here
            raise Malformed
        name = name.strip()
        if end not in stops:
            source.take(len(end))
        yield from source.blank()
        stop = yield from source.literal(*stops)
        if stop is None or not is_name(name):
            raise Malformed
        self.begin_call(name)
        schema = ArgumentTypes(self._tools.get(name, {}))
        self.emit_arguments("{")
        first = True
        while stop == form.parameter[0]:
            if not first:
                self.emit_arguments(", ")
            first = False
            yield from self._read_parameter(schema)
            yield from source.blank()
            stop = yield from source.literal(*stops)
        if stop is None:
            raise Malformed
        self.emit_arguments("}")
        self.end_call()

    def _read_parameter(self, schema: ArgumentTypes) -> Steps[None]:
        source, form = self.source, self._form
        key, end = yield from source.short(markers(*form.key_ends), MAX_NAME)
        source.take(len(end))
        key = key.strip()
        if form.value_begin:
            yield from source.blank()
            if not (yield from source.literal(form.value_begin)):
                raise Malformed
        if form.lines:
            yield from source.literal("\n")
        self.emit_arguments(f'"{escaped(key)}": ')
        types = form.key_ends[end]
        yield from self._read_value(schema.types_of(key) if types is None else types)

    def _read_value(self, types: Types) -> Steps[None]:
        """Read a value and the text after it. Without a grammar, a value also ends where the next argument or the end
        of the call begins, because models forget the text after the value."""
        source, form = self.source, self._form
        pieces: list[str] = []
        streams = types == STRING
        emit = (lambda text: self.emit_arguments(escaped(text))) if streams else pieces.append
        newlines = "\n" if form.lines else ""
        value = HeldEnd(emit, newlines)
        if streams:
            self.emit_arguments('"')
        end = yield from source.until(self._value_ends, value.push)
        if end is None:
            raise Malformed
        value.flush(without=newlines)
        if end == form.parameter[1]:
            source.take(len(end))
        self.emit_arguments('"' if streams else json_of("".join(pieces), types))
