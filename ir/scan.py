"""Scan a program's text into tokens. `Line` is a cursor over one line; its errors name line and column."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ingot.ir.errors import IngotError, ParseError

_TOKEN = re.compile(
    r"""(?P<space>[ ]+)
      | (?P<comment>\#.*)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<number>-?(?:inf\b|nan\b|Infinity\b|NaN\b|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))
      | (?P<value>%[A-Za-z_0-9][\w.]*)
      | (?P<name>[A-Za-z_][\w-]*(?:\.[\w-]+)*)
      | (?P<punct>[()\[\]{}<>=:;,@+.])""",
    re.VERBOSE | re.ASCII,
)

MAX_DEPTH = 64  # nested lists and recipes: real ones stay below ten, and Python's stack allows more


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int
    column: int


def scan(text: str) -> list[list[Token]]:
    """Split each line of a program's text into tokens.

    Comments are tokens too, because they say which layer a call comes from. Raises ParseError for an unexpected
    character.
    """
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        tokens, place = [], 0
        while place < len(line):
            match = _TOKEN.match(line, place)
            if match is None:
                raise ParseError(f"unexpected character {line[place]!r}", where=f"line {number}, column {place + 1}")
            kind = match.lastgroup or ""
            if kind != "space":
                tokens.append(Token(kind, match.group(), number, place + 1))
            place = match.end()
        lines.append(tokens)
    return lines


class Line:
    """A cursor over the tokens of one line of a program's text. `place` is the index of the next token."""

    def __init__(self, tokens: list[Token], number: int) -> None:
        self.comment = tokens.pop().text[1:].strip() if tokens and tokens[-1].kind == "comment" else ""
        self.tokens, self.number, self.place, self.depth = tokens, number, 0, 0

    def where(self, at: int | None = None) -> str:
        """Return "line N, column M" for the token with index `at`. By default that is the next token."""
        place = self.place if at is None else at
        if place < len(self.tokens):
            column = self.tokens[place].column
        else:
            column = self.tokens[-1].column + len(self.tokens[-1].text) if self.tokens else 1
        return f"line {self.number}, column {column}"

    def error(self, what: str, expected: str = "", *, at: int | None = None) -> ParseError:
        """Return a ParseError with the position of the token with index `at`. By default that is the next token.

        It is not raised here.
        """
        return ParseError(what, where=self.where(at), expected=expected)

    def peek(self) -> str:
        return self.tokens[self.place].text if self.place < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.place].kind if self.place < len(self.tokens) else "end"

    def take(self, kind: str, expected: str) -> str:
        if self.kind() != kind:
            raise self.error(f"unexpected {self.peek()!r}" if self.peek() else "the line ends too early", expected)
        self.place += 1
        return self.tokens[self.place - 1].text

    def skip(self, text: str) -> bool:
        """If the next token is `text`, move past it and return True. Otherwise return False."""
        if self.peek() == text and self.kind() != "string":
            self.place += 1
            return True
        return False

    def need(self, text: str) -> None:
        if not self.skip(text):
            raise self.error(f"unexpected {self.peek()!r}" if self.peek() else "the line ends too early", f"'{text}'")

    def name(self, expected: str = "a name") -> str:
        return self.take("name", expected)

    def integer(self) -> int:
        text = self.take("number", "a whole number")
        try:
            return int(text)
        except ValueError:
            self.place -= 1
            raise self.error(f"'{text}' is not a whole number", "a whole number") from None

    def number_value(self) -> int | float:
        text = self.take("number", "a number")
        try:
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        except ValueError:  # Python's int() rejects more than 4300 digits
            self.place -= 1
            raise self.error("a number of too many digits") from None

    def string(self) -> str:
        text = self.take("string", "a quoted string")
        try:
            return str(json.loads(text))
        except json.JSONDecodeError:
            self.place -= 1
            raise self.error(f"bad string {text}", "a JSON string") from None

    def listed(self, item: Callable[[], Any], close: str) -> list[Any]:
        """Parse items separated by commas, up to and including the token `close`. `item` parses one item."""
        items: list[Any] = []
        if self.skip(close):
            return items
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels")
        while True:
            items.append(item())
            if self.skip(close):
                self.depth -= 1
                return items
            self.need(",")

    def end(self) -> None:
        if self.place < len(self.tokens):
            raise self.error(f"unexpected {self.peek()!r}", "the end of the line")

    def guarded(self, make: Callable[[], Any], *, at: int | None = None) -> Any:
        """Call `make` and return its result.

        If it raises an IngotError, raise a ParseError with line and column instead.

        These are the line and column of the token with index `at`. By default that is the next token.
        """
        try:
            return make()
        except ParseError:
            raise
        except IngotError as error:
            raise self.error(error.what, error.expected, at=at) from error

    def bounds(self) -> tuple[int, int]:
        start = self.place
        self.need("[")
        found = self.listed(self.integer, "]")
        if len(found) != 2:
            raise self.error(f"{len(found)} bounds", "[lo, hi]", at=start)
        return found[0], found[1]
