"""Split a program's text into lines and their parts, with the scanner of the text form.

The report shows and compares programs by line and never builds them, so that any trace can be shown.
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
    """The parts of one line of a program's text.

    - `kind`: the line's first word, such as "param"; "call"; "end" (the end of a region); or "other" if the line is not
      understood
    - `name`: the name that the line defines; for `program` and `return`, the rest of the line
    - `op`: the target of a call, the kind of a state, or the backend of a region
    - `text`: the arguments of a call, a param's recipe (how it is made), a state's group and unit, or a dim's bounds
    - `type`: the type of the value, or ""
    - `placement`: how the value is distributed over a mesh of devices; "" without a mesh
    - `backend`: the backend that computes the call
    - `origin`: the source line in the model definition
    - `layer`: the decoder layer, read from the origin or the name; None if unknown
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
    """Split the text of a program into lines, and yield the parts of each. Lines inside regions are included.

    Raises ParseError if a line cannot be scanned.
    """
    for line in text.rstrip("\n").split("\n"):
        yield _line(line.strip())


def layer_of(origin: str, name: str = "") -> int | None:
    """Return the number of the decoder layer of a call or a param, or None if there is none.

    `origin` is a call's source line, such as "layer 3, attention.py:112". `name` is a param's name, such as
    "layers.3.mlp". For a region (calls compiled together) that spans several layers, it is the first layer.
    """
    found = _LAYER_ORIGIN.match(origin) or _LAYER_NAME.search(name)
    return int(found[1]) if found else None


@cache  # most lines of a program recur after the next pass
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
    """A line of a program's text, cut into tokens. Methods take and return indices of tokens."""

    text: str
    tokens: list[Token]

    def cut(self, begin: int, end: int | None = None) -> str:
        """Return the text of the tokens from index `begin` up to `end`, exclusive. None is the end of the line."""
        cut = self.tokens[begin:end]
        return self.text[cut[0].column - 1 : cut[-1].column - 1 + len(cut[-1].text)] if cut else ""

    def first(self, text: str, begin: int) -> int:
        """Return the index of the first token with the text `text`, from index `begin` on.

        If there is none, return the number of tokens.
        """
        return next((at for at in range(begin, len(self.tokens)) if self._is(at, text)), len(self.tokens))

    def closing(self, opened: int) -> int:
        """Return the index of the token that closes the bracket at index `opened`.

        If none does, return the number of tokens.
        """
        depth = 0
        for at in range(opened, len(self.tokens)):
            depth += self._is(at, "(") - self._is(at, ")")
            if not depth:
                return at
        return len(self.tokens)

    def typed(self, begin: int, end: int | None = None) -> int:
        """Return the index of the token after a type. The type begins at token `begin`.

        That token begins a placement, a recipe or a state's group. If there is none before `end`, return `end`.
        """
        end = len(self.tokens) if end is None else end
        equals = self.first("=", begin)
        if equals >= end:
            return end
        return equals - 1 if self.tokens[equals - 1].kind == "name" and equals - 1 > begin else equals

    def recipe(self, begin: int) -> int:
        """Return the index of the equals sign before a param's recipe (how it is made of checkpoint tensors).

        The param's placements (its distribution over a mesh) begin at token `begin`. They are skipped, because each has
        an equals sign too.
        """
        at = begin
        while at < len(self.tokens) and not self._is(at, "="):
            at += 3  # name, equals sign, placement
            if at < len(self.tokens) and self._is(at, "("):
                at = self.closing(at) + 1
        return at

    def _is(self, at: int, text: str) -> bool:
        return self.tokens[at].text == text and self.tokens[at].kind != "string"
