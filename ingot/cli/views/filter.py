"""The options --layer, --op and --name of `ingot inspect`: select lines, instructions, weights and choices."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ingot.cli.views.lines import Line, ProgramLines
from ingot.ir.errors import OptionError


@dataclass(frozen=True)
class Filter:
    """The options --layer, --op and --name. An item is shown if it matches all three. An option that is None matches
    all.

    `layers` is the first and the last layer of a range. `op` is the name of an op, such as "linear". The namespace may
    be left out, as in "slice" for aten.slice.Tensor. `name` is a pattern for the name of a value, with * and ?.
    """

    layers: tuple[int, int] | None = None
    op: str | None = None
    name: str | None = None

    @staticmethod
    def of(layer: str | None, op: str | None, name: str | None) -> "Filter":
        """Return the filter for the texts of --layer ("3" or "2-5"), --op and --name. Raises OptionError if `layer` is
        malformed."""
        if layer is None:
            return Filter(None, op, name)
        given = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", layer)
        first, last = (int(given[1]), int(given[2] or given[1])) if given else (1, 0)
        if first > last:
            raise OptionError(f"'{layer}' is not a layer", where="--layer", expected="a number, or a range like 2-5")
        return Filter((first, last), op, name)

    def __bool__(self) -> bool:
        return (self.layers, self.op, self.name) != (None, None, None)

    def __str__(self) -> str:
        layers = self.layers and "-".join(map(str, sorted(set(self.layers))))
        given = (("--layer", layers), ("--op", self.op), ("--name", self.name))
        return " ".join(f"{option} {value}" for option, value in given if value is not None)

    def holds(self, name: str, ops: Iterable[str], layers: Iterable[int]) -> bool:
        """Return whether an item matches the filter.

        Three things must match: its `name`, at least one of its `ops`, and at least one of its `layers`.
        """
        if self.layers is not None and not any(self.layers[0] <= layer <= self.layers[1] for layer in layers):
            return False
        if self.name is not None and not fnmatchcase(name, self.name):
            return False
        return self.op is None or any(_is_op(op, self.op) for op in ops)

    def takes(self, line: Line) -> bool:
        """Return whether a line of a program's text matches the filter.

        Only calls and declarations of inputs, params and states can match.
        """
        return bool(line.name) and line.kind != "region" and self.holds(line.name, [line.op], line.layers)

    def check(self, programs: Iterable[ProgramLines]) -> None:
        """Raise OptionError if no program contains the filter's op or layer. It is then probably misspelled."""
        lines = [line for program in programs for line in program.lines]
        ops = sorted({line.op for line in lines if line.op})
        if self.op is not None and not any(_is_op(op, self.op) for op in ops):
            nearest = difflib.get_close_matches(self.op, [*ops, *(_short(op) for op in ops)], n=1)
            raise OptionError(
                f"no op '{self.op}' is called",
                where="--op",
                expected=", ".join(ops),
                hint=f"the nearest is '{nearest[0]}'" if nearest else "",
            )
        layers = {layer for line in lines for layer in line.layers}
        if self.layers is not None and not any(self.layers[0] <= layer <= self.layers[1] for layer in layers):
            there = f"{min(layers)} to {max(layers)}" if layers else "no layers"
            raise OptionError(f"there is no layer {self.layers[0]}", where="--layer", expected=there)


NO_FILTER = Filter()


def _short(op: str) -> str:
    return op.partition(".")[2].partition(".")[0] or op


def _is_op(op: str, wanted: str) -> bool:
    return wanted in (op, op.partition(".")[2], _short(op), *(["region"] if op.startswith("region.") else []))


@dataclass(frozen=True)
class Shown:
    """A line to print. `asked` is True if the line matches the filter. It is False for a line of context."""

    text: str
    asked: bool


def excerpt(program: ProgramLines, wanted: Filter) -> list[Shown]:
    """Return the lines of a program that match the filter, with context. Return an empty list if no line matches.

    Context is the program's header, and the definitions of the values that a matching line uses. For a line in a
    region, the first and last lines of the region are context too. A line of dots replaces the lines left out.
    """
    lines = program.lines
    asked = {index for index, line in enumerate(lines) if wanted.takes(line)}
    if not asked:
        return []
    places = {(_scope(line), line.name): index for index, line in enumerate(lines) if line.name}
    kept = {0, *asked}
    for index in asked:
        kept.update(places[key] for use in lines[index].uses if (key := (_scope(lines[index]), use)) in places)
    regions = {lines[index].region for index in kept if lines[index].region}
    kept.update(index for index, line in enumerate(lines) if line.region in regions and line.kind in ("region", "}"))
    shown: list[Shown] = []
    last = -1
    for index in sorted(kept):
        if index > last + 1:
            shown.append(Shown("  …" if _scope(lines[index]) or lines[index].kind == "}" else "…", False))
        shown.append(Shown(lines[index].text, index in asked))
        last = index
    if last + 1 < len(lines):
        shown.append(Shown("…", False))
    return shown


def _scope(line: Line) -> str:
    """Return the region in which the names of a line are defined; "" for the program itself."""
    return "" if line.kind == "region" else line.region
