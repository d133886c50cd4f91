"""A program's text, line by line: what each line defines, taken apart with the scanner of the text form.

The report shows programs and looks for their differences by line; it never builds them, so any trace can be shown.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ingot.ir.scan import Token, scan

_LAYER_ORIGIN = re.compile(r"layer (\d+)\b")
_LAYER_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class ProgramLine:
    """One line. `kind` is its first word, or "call", or "end" for the brace that closes a region.

    name        what it defines; of `program` and `return` their rest
    op          what a call calls; a state's kind; the backend of a region
    text        a call's arguments, a param's recipe, a state's group and unit, a dim's bounds
    type        of its value, "" where it has none
    placement   on the mesh
    backend     who computes it
    origin      the model's source line
    layer       the model's layer that it belongs to, by origin or name
    """

    kind: str
    name: str
    op: str = ""
    text: str = ""
    type: str = ""
    placement: str = ""
    backend: str = ""
    origin: str = ""
    layer: int | None = None


def program_lines(text: str) -> Iterator[ProgramLine]:
    """The lines of a program's text, those of region bodies where they stand. Raises ParseError for other text."""
    for line in text.rstrip("\n").split("\n"):
        yield _line(line.strip())


def layer_of(origin: str, name: str = "") -> int | None:
    """The layer that an origin or a param's name tells; the first of a region that spans several."""
    found = _LAYER_ORIGIN.match(origin) or _LAYER_NAME.search(name)
    return int(found[1]) if found else None


@cache  # most lines of a program stand in the program after the next pass as well
def _line(text: str) -> ProgramLine:
    (tokens,) = scan(text)
    origin = ""
    if tokens and tokens[-1].kind == "comment":
        origin = tokens.pop().text[1:].strip()
    line = _Cut(text, tokens)
    match [token.text for token in tokens[:2]]:
        case [value, "="] if tokens[0].kind == "value":
            return _call(line, value[1:], origin)
        case ["}"]:
            return ProgramLine("end", "")
        case ["return" | "program" as kind, *_]:
            return ProgramLine(kind, line.cut(1))
        case ["region", name]:
            return ProgramLine("region", name, op=line.cut(3, -1))
        case ["dim" | "mesh" as kind, name]:
            return ProgramLine(kind, name, text=line.cut(2))
        case ["input" as kind, name]:
            kind_at = line.typed(3)
            return ProgramLine(kind, name, type=line.cut(3, kind_at), placement=line.cut(kind_at))
        case ["param" as kind, name]:
            place = line.typed(3)
            recipe = line.recipe(place)
            return ProgramLine(
                kind,
                name,
                text=line.cut(recipe + 1),
                type=line.cut(3, place),
                placement=line.cut(place, recipe),
                layer=layer_of("", name),
            )
        case ["state" as kind, name]:
            group = line.typed(4)
            return ProgramLine(kind, name, op=line.cut(3, 4), text=line.cut(group), type=line.cut(4, group))
    return ProgramLine("other", text)


def _call(line: "_Cut", name: str, origin: str) -> ProgramLine:
    opened = line.first("(", 2)
    closed = line.closing(opened)
    at = line.first("@", closed)
    place = line.typed(closed + 2, at)
    return ProgramLine(
        "call",
        name,
        op=line.cut(2, opened),
        text=line.cut(opened + 1, closed),
        type=line.cut(closed + 2, place),
        placement=line.cut(place, at),
        backend=line.cut(at + 1),
        origin=origin,
        layer=layer_of(origin),
    )


@dataclass(frozen=True)
class _Cut:
    """A line as tokens, from which text is cut out as it stands there."""

    text: str
    tokens: list[Token]

    def cut(self, begin: int, end: int | None = None) -> str:
        """The text of the tokens from `begin` up to `end`."""
        cut = self.tokens[begin:end]
        return self.text[cut[0].column - 1 : cut[-1].column - 1 + len(cut[-1].text)] if cut else ""

    def first(self, text: str, begin: int) -> int:
        """The number of the first token `text` from `begin` on; that behind the last one where there is none."""
        return next((at for at in range(begin, len(self.tokens)) if self._is(at, text)), len(self.tokens))

    def closing(self, opened: int) -> int:
        """The number of the token that closes the bracket `opened`."""
        depth = 0
        for at in range(opened, len(self.tokens)):
            depth += self._is(at, "(") - self._is(at, ")")
            if not depth:
                return at
        return len(self.tokens)

    def typed(self, begin: int, end: int | None = None) -> int:
        """Where the type that begins at `begin` ends: before a placement, a recipe or a state's group."""
        end = len(self.tokens) if end is None else end
        equals = self.first("=", begin)
        if equals >= end:
            return end
        return equals - 1 if self.tokens[equals - 1].kind == "name" and equals - 1 > begin else equals

    def recipe(self, begin: int) -> int:
        """The number of the equals sign in front of a recipe: the first that no placement's name stands before."""
        at = begin
        while at < len(self.tokens) and not self._is(at, "="):
            at += 3  # name, equals sign, how it lies
            if at < len(self.tokens) and self._is(at, "("):
                at = self.closing(at) + 1
        return at

    def _is(self, at: int, text: str) -> bool:
        return self.tokens[at].text == text and self.tokens[at].kind != "string"
