"""Calls as Python's calls, as in `[weather(city="Oslo", days=3), time()]`."""

import re
from dataclasses import dataclass

from ingot.serve.parsers.machine import ToolMachine
from ingot.serve.parsers.names import MAX_NAME
from ingot.serve.parsers.source import Malformed, Steps, markers
from ingot.serve.parsers.tool_use import Tools
from ingot.serve.parsers.values import PYTHON, escaped, read_value

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\w+")


@dataclass(frozen=True)
class PythonicForm:
    """The places of calls in Python's form.

    openings   markers before them; without any, they begin the message
    closings   markers after them; the model may leave them out
    listed     the calls are in square brackets, with commas between them; else they need neither
    """

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    bare: bool = False
    listed: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all texts of the format."""
        return (*self.openings, *self.closings)

    def machine(self, _tools: Tools) -> ToolMachine:
        """Return a machine for one message."""
        return PythonicCalls(self)


class PythonicCalls(ToolMachine):
    """Reads calls in the form of `PythonicForm`."""

    def __init__(self, form: PythonicForm) -> None:
        self._form = form
        self.openings = markers(*form.openings)
        self.at_begin = form.bare
        super().__init__()

    def read_calls(self, opening: str) -> Steps[None]:
        source, form = self.source, self._form
        listed = (yield from source.blank()) == "["
        if listed:
            source.take(1)
        elif form.listed:
            raise Malformed
        while True:
            yield from source.blank()
            yield from self._read_call()
            char = yield from source.blank()
            if listed and char == "]":
                source.take(1)
                source.keep()
                break
            if char == ",":
                source.take(1)
            elif listed:
                raise Malformed
            if not listed and (yield from self._closed()):
                return
        yield from self._closed()

    def _closed(self) -> Steps[bool]:
        """Read a closing marker, if one comes next. Return whether one has come."""
        yield from self.source.blank()
        if not self._form.closings or not (yield from self.source.literal(*self._form.closings)):
            return False
        self.source.keep()
        return True

    def _read_call(self) -> Steps[None]:
        """Read `name(key=value, …)`. The call begins at its first key, so that text such as `see(1)` is content."""
        source = self.source
        name = yield from source.run(_NAME, MAX_NAME)
        if not name or (yield from source.blank()) != "(":
            raise Malformed
        source.take(1)
        begin = "{"
        while (yield from source.blank()) != ")":
            key = yield from source.run(_KEY, MAX_NAME)
            if not key or (yield from source.blank()) != "=":
                raise Malformed
            source.take(1)
            if begin == "{":
                self.begin_call(name)
            self.emit_arguments(f'{begin}"{escaped(key)}": ')
            yield from read_value(source, PYTHON, self.emit_arguments)
            begin = ", "
            char = yield from source.blank()
            if char == ",":
                source.take(1)
            elif char != ")":
                raise Malformed
        source.take(1)
        if begin == "{":
            self.begin_call(name)
            self.emit_arguments("{")
        self.emit_arguments("}")
        self.end_call()
