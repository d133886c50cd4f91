"""Read a program's text as lines: what each defines, calls and uses. Unlike the parser, this needs no torch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ingot.ir.artifact.trace import trace_name
from ingot.ir.errors import ParseError
from ingot.ir.scan import Token, scan

_LAYER = re.compile(r"\blayer (\d+)\b")  # in an origin
_PARAM_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # in a param's name
_VIEWS = ("aten.view.default", "aten.slice.Tensor", "aten.permute.default")
_DECLARED = ("input", "param", "state")


@dataclass(frozen=True)
class Line:
    """One line of a program's text.

    kind     "call" for a call, "}" for the end of a region, else the first word, such as "input", "param" or "region"
    name     the value that the line defines
    op       the op that it calls
    uses     the values that it reads
    region   the region that contains the line, or ""
    layers   the layers of the model that the line belongs to

    A call names its layers in its comment. A declaration belongs to the layers of the calls that read it. A line in a
    region belongs to the layers of the calls of that region.
    """

    text: str
    kind: str
    name: str = ""
    op: str = ""
    uses: tuple[str, ...] = ()
    region: str = ""
    layers: frozenset[int] = field(default=frozenset())

    @property
    def backend(self) -> str:
        """Return the backend after "@" in a call or in the first line of a region; "" if there is none."""
        return next((word[1:] for word in self.text.partition("  #")[0].split(" ") if word.startswith("@")), "")


@dataclass(frozen=True)
class ProgramLines:
    """The lines of one program's text.

    `title` is the program's bucket class (a range of step sizes), such as "decode". For an entry other than `main`,
    such as a draft model, the entry comes first, as in "draft@decode".
    """

    title: str
    lines: tuple[Line, ...]

    def calls(self) -> Iterator[Line]:
        """Yield the calls of the program, in order. Calls inside regions are left out."""
        return (line for line in self.lines if line.kind == "call" and not line.region)

    def body(self, call: Line) -> list[Line]:
        """Return the lines inside the region that the line `call` calls. Return an empty list if it calls an op."""
        region = call.op.removeprefix("region.") if call.op.startswith("region.") else None
        return [line for line in self.lines if line.region == region and line.kind != "region"]

    def computed_by(self, call: Line) -> list[str]:
        """Return the names of the ops that the line `call` runs.

        The first one is its own target. If this is a region, the ops in the region follow.
        """
        return [call.op, *(line.op for line in self.body(call) if line.op)]

    def readers(self, name: str) -> set[str]:
        """Return the names of the ops that read the value `name`. Ops in regions count, and ops that read it through a
        view."""
        return set(self._readers(name, list(self.calls())))

    def _readers(self, name: str, among: Sequence[Line]) -> Iterator[str]:
        for call in among:
            if name not in call.uses:
                continue
            yield call.op
            if body := self.body(call):
                yield from self._readers(f"in{call.uses.index(name)}", [line for line in body if line.kind == "call"])
            elif call.op in _VIEWS:
                yield from self._readers(call.name, among)


def read_programs(text: str) -> list[ProgramLines]:
    """Return the programs in `text`, in order. The text holds one program or several.

    Raises ParseError if the text does not begin with a program.
    """
    found: list[list[Line]] = []
    region = ""
    for raw, tokens in zip(text.split("\n"), scan(text), strict=True):
        if not tokens:
            continue
        line = _line(raw, tokens, region)
        if line.kind == "program":
            found.append([])
        if not found:
            raise ParseError(f"the text begins with {raw[:80]!r}", where="line 1", expected="program NAME stage=STAGE")
        found[-1].append(line)
        region = line.name if line.kind == "region" else "" if line.kind == "}" else region
    return [ProgramLines(_title(lines[0].text), tuple(_with_layers(lines))) for lines in found]


def _title(header: str) -> str:
    words = header.split(" ")
    bucket = next((word.removeprefix("bucket=") for word in words if word.startswith("bucket=")), None)
    return trace_name(words[1] if len(words) > 1 else "", bucket)


def _line(raw: str, tokens: Sequence[Token], region: str) -> Line:
    first, body = tokens[0], [token for token in tokens if token.kind != "comment"]
    origin = tokens[-1].text if tokens[-1].kind == "comment" else ""
    if first.kind == "value":
        uses = tuple(dict.fromkeys(token.text[1:] for token in body[1:] if token.kind == "value"))
        op = body[2].text if len(body) > 2 else ""
        layers = frozenset(map(int, _LAYER.findall(origin)))
        return Line(raw, "call", first.text[1:], op, uses, region, layers)
    if first.text in (*_DECLARED, "region"):
        name = body[1].text if len(body) > 1 else ""
        layers = frozenset(map(int, _PARAM_LAYER.findall(name)))
        return Line(raw, first.text, name, region=name if first.text == "region" else region, layers=layers)
    uses = tuple(token.text[1:] for token in body if token.kind == "value") if first.text == "return" else ()
    return Line(raw, first.text, uses=uses, region=region)


def _with_layers(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the lines with their `layers` set.

    A declaration gets the layers of the calls that read it. A line in a region gets the layers of that region's calls.
    """
    users: dict[str, set[int]] = {}
    for line in lines:
        if line.kind == "call" and not line.region:
            for name in (*line.uses, line.op):
                users.setdefault(name, set()).update(line.layers)
    for line in lines:
        if line.region:
            yield _placed(line, users.get(f"region.{line.region}", set()))
        elif line.kind in _DECLARED and not line.layers:
            yield _placed(line, users.get(line.name, set()))
        else:
            yield line


def _placed(line: Line, layers: set[int]) -> Line:
    return Line(line.text, line.kind, line.name, line.op, line.uses, line.region, frozenset(layers))
