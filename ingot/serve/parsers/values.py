"""Values in JSON, in Python's notation and in Gemma's, read in pieces and written as JSON text.

All three are scalars in brackets, so one reader with a `Notation` reads them. Its result is spaced as by `json.dumps`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ingot.serve.parsers.source import Malformed, Markers, Sink, Source, Steps, markers

# As deep as a conversation may nest when the client sends the call back (`ingot.runtime.chat.messages`).
_MAX_DEPTH = 64
# A longer word is no number that JSON parsers read: doubles have 17 significant digits, and Python reads 4300.
_MAX_WORD = 400
_WORD = re.compile(r"[\w.+\-]+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]")


def escaped(text: str) -> str:
    """Return text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(frozen=True)
class Notation:
    """How values are written.

    quotes           the texts around a string; the longest that fits counts
    escape           reads the escape sequence after a backslash and returns it for JSON; None: there are none
    words            unquoted values, and their JSON
    number           returns the JSON of an unquoted word that is a number, or None
    brackets         opening and closing brackets; "{" begins an object, the others a list
    bare_keys        keys of objects are words, not strings
    trailing_comma   a comma may come before a closing bracket
    """

    quotes: tuple[str, ...]
    escape: Callable[[Source], Steps[str]] | None
    words: Mapping[str, str]
    number: Callable[[str], str | None]
    brackets: Mapping[str, str]
    bare_keys: bool = False
    trailing_comma: bool = False

    def ends_of(self, quote: str) -> Markers:
        """Return the markers at which the text of a string stops."""
        return markers(quote) if self.escape is None else markers(quote, "\\")


def read_value(source: Source, notation: Notation, write: Sink) -> Steps[None]:
    """Read one value, and write it as JSON in pieces. Raises Malformed at the first character that is wrong."""
    closings: list[str] = []
    while True:
        char = yield from source.blank()
        if closing := notation.brackets.get(char):
            if len(closings) == _MAX_DEPTH:
                raise Malformed
            source.take(1)
            closings.append(closing)
            write("{" if char == "{" else "[")
            if (yield from source.blank()) != closing:
                if closing == "}":
                    yield from _read_key(source, notation, write)
                continue
        elif quote := (yield from source.literal(*notation.quotes)):
            yield from _read_string(source, notation, quote, write)
        else:
            yield from _read_word(source, notation, write)
        if (yield from _read_after(source, notation, closings, write)):
            return


def _read_after(source: Source, notation: Notation, closings: list[str], write: Sink) -> Steps[bool]:
    """Read brackets that close after a value, and the comma and the key before the next value. Return whether the
    outermost value has ended."""
    while closings:
        char = yield from source.blank()
        if char == ",":
            source.take(1)
            char = yield from source.blank()
            if char != closings[-1] or not notation.trailing_comma:
                write(", ")
                if closings[-1] == "}":
                    yield from _read_key(source, notation, write)
                return False
        if char != closings[-1]:
            raise Malformed
        source.take(1)
        write("}" if closings.pop() == "}" else "]")
    return True


def _read_key(source: Source, notation: Notation, write: Sink) -> Steps[None]:
    """Read the key of an object's item and the colon after it."""
    yield from source.blank()
    if quote := (yield from source.literal(*notation.quotes)):
        yield from _read_string(source, notation, quote, write)
    elif notation.bare_keys:
        word = yield from source.run(_WORD, _MAX_WORD)
        if not word:
            raise Malformed
        write(f'"{escaped(word)}"')
    else:
        raise Malformed
    if (yield from source.blank()) != ":":
        raise Malformed
    source.take(1)
    write(": ")


def _read_string(source: Source, notation: Notation, quote: str, write: Sink) -> Steps[None]:
    """Read a string after its opening quote, up to the closing one."""
    write('"')
    while True:
        found = yield from source.until(notation.ends_of(quote), lambda piece: write(escaped(piece)))
        if found is None:
            raise Malformed
        source.take(len(found))
        if found == quote:
            write('"')
            return
        assert notation.escape is not None
        write((yield from notation.escape(source)))


def _read_word(source: Source, notation: Notation, write: Sink) -> Steps[None]:
    word = yield from source.run(_WORD, _MAX_WORD)
    value = notation.words.get(word) or notation.number(word)
    if value is None:
        raise Malformed
    write(value)


def read_text(source: Source, notation: Notation) -> Steps[str]:
    """Read a value that must be a string, and return its text. Raises Malformed."""
    value = yield from read_whole(source, notation)
    text = json.loads(value)
    if not isinstance(text, str):
        raise Malformed
    return text


def read_whole(source: Source, notation: Notation) -> Steps[str]:
    """Read a value, and return its JSON text when it is complete. Raises Malformed."""
    pieces: list[str] = []
    yield from read_value(source, notation, pieces.append)
    return "".join(pieces)


def _json_escape(source: Source) -> Steps[str]:
    """Return an escape sequence of JSON as it is."""
    char = yield from source.exactly(1)
    if char in '"\\/bfnrt':
        return "\\" + char
    if char == "u":
        digits = yield from source.exactly(4)
        if _HEX.fullmatch(digits):
            return "\\u" + digits
    raise Malformed


# Python's escape sequences: https://docs.python.org/3/reference/lexical_analysis.html#escape-sequences
_SINGLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}


def _python_escape(source: Source) -> Steps[str]:
    """Return the JSON of an escape sequence of Python. An unknown one is a backslash and its character."""
    char = yield from source.exactly(1)
    if size := _DIGITS.get(char):
        digits = yield from source.exactly(size)
        if not _HEX.fullmatch(digits):
            raise Malformed
        return _character(int(digits, 16))
    if _OCTAL.match(char):
        while len(char) < 3 and _OCTAL.match((yield from source.peek())):
            char += source.take(1)
        return _character(int(char, 8))
    if char in "'\"\\":
        return escaped(char)
    return escaped(_SINGLE.get(char, "\\" + char))


def _character(code: int) -> str:
    if code > 0x10FFFF:
        raise Malformed
    # A surrogate is no character: it stays an escape, so that a pair of them is read as one character.
    return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else escaped(chr(code))


def _json_number(word: str) -> str | None:
    return word if _JSON_NUMBER.fullmatch(word) else None


def _python_number(word: str) -> str | None:
    if _JSON_NUMBER.fullmatch(word):
        return word
    if not _NUMBER.fullmatch(word):
        return None
    try:
        value = float(word) if any(char in word for char in ".eE") else int(word)
    except ValueError:  # a trailing or doubled underscore
        return None
    return repr(value) if math.isfinite(value) else None


_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
# Models that write Python also write JSON's words.
_PYTHON_WORDS = {**_JSON_WORDS, "True": "true", "False": "false", "None": "null"}

JSON = Notation(('"',), _json_escape, _JSON_WORDS, _json_number, {"{": "}", "[": "]"})
PYTHON = Notation(
    ("'", '"', "'''", '"""'),
    _python_escape,
    _PYTHON_WORDS,
    _python_number,
    {"{": "}", "[": "]", "(": ")"},
    trailing_comma=True,
)


def gemma(quote: str) -> Notation:
    """Return the notation of Gemma's calls, as in {city:<escape>Oslo<escape>,days:3}, with this text around strings."""
    return Notation((quote,), None, _PYTHON_WORDS, _json_number, {"{": "}", "[": "]"}, bare_keys=True)


def converted(text: str, notation: Notation) -> str | None:
    """Return the JSON of a text that is one value; None if it is not."""
    source = Source()
    source.add(text)
    source.ended = True
    pieces: list[str] = []

    def steps() -> Steps[str]:
        yield from read_value(source, notation, pieces.append)
        return (yield from source.blank())

    try:
        next(steps())
    except StopIteration as end:
        return None if end.value else "".join(pieces)
    except Malformed:
        pass
    return None
