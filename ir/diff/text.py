"""Print a diff of two programs: one line per value that differs, and one for equal changes in several layers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ingot.ir.diff.difference import Difference, ProgramDiff

_LONGEST = 100  # characters of an old or new text inside a line; recipes are the longest


@dataclass(frozen=True)
class _Line:
    sign: str
    thing: str
    change: str
    layers: tuple[int, ...]

    @property
    def pattern(self) -> str:
        """Return a text that is equal for lines that differ only in the layer.

        It leaves out the numbers in names, and the names of calls. Lines with equal patterns are printed as one.
        """
        thing = self.thing.partition(" = ")[2] if self.change and self.thing.startswith("%") else self.thing
        return self.sign + _NAMES.sub(lambda name: _NUMBERS.sub("", name[0]), thing + self.change)

    def text(self, layer: int | None) -> str:
        """Return the line as text with the number `layer`; None: without a layer."""
        if layer is None:
            return f"{self.sign} {self.thing}{self.change}"
        return f"{self.sign} {self.thing}" + (f" layer {layer}{self.change}" if self.change else f"  # layer {layer}")


# Values, states, checkpoint tensors, names at the start of a line, and attention's `layer`.
_NAMES = re.compile(r'%[\w.]+|state<[\w.]+>|"[\w.]+"|^(?:param|state|input|output) [\w.]+|\blayer=\d+|\(was [\w.]+\)')
_NUMBERS = re.compile(r"_\d+\b|(?<=[.=])\d+\b")


def diff_lines(diff: ProgramDiff) -> list[str]:
    """Return a diff as lines of text. "~" marks a change, "-" a removed value and "+" an added value.

    Empty if nothing differs.
    """
    lines = [f"~ {one.field} {one.old} -> {one.new}" for one in diff.header]
    found = [*_changes(diff.changed), *(_Line("-", one.old + _region(one), "", one.layers) for one in diff.removed)]
    found += [_Line("+", one.new + _region(one), "", one.layers) for one in diff.added]
    folded = _folded(found)
    lines += [text for layers, text in folded if not layers]
    previous: tuple[int, ...] = ()
    for layers, text in folded:
        if len(layers) == 1:
            lines.append(text)
        elif layers:
            if layers != previous:
                lines.append(f"in layers {numbers_text(layers)}:")
            lines.append(f"  {text}")
        previous = layers
    return lines


def _region(one: Difference) -> str:
    return f" in region {one.region}" if one.region and one.what != "region" else ""


def _changes(changed: Iterable[Difference]) -> list[_Line]:
    """Return one line for each changed value, with all its changed fields."""
    things: dict[tuple[object, ...], list[Difference]] = {}
    for one in changed:
        things.setdefault((one.what, one.before, one.after, one.layers, one.region), []).append(one)
    return [
        _Line("~", _thing(fields[0]), ": " + "; ".join(map(_field, fields)), fields[0].layers)
        for fields in things.values()
    ]


def _thing(one: Difference) -> str:
    name = one.after or one.before
    was = f" (was {one.before})" if one.before and one.after and one.before != one.after else ""
    if one.what in ("input", "param", "state", "output", "region"):
        return f"{one.what} {name}{was}"
    return f"%{name}{was} = {one.what}(...){_region(one)}"


def _field(one: Difference) -> str:
    old, new = one.old, one.new
    if one.field == "recipe" and (old in new or new in old):  # an outer step was added or removed
        inner = min(old, new, key=len)
        old, new = old.replace(inner, "…"), new.replace(inner, "…")
    return f"{one.field} {_short(old)} -> {_short(new)}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _folded(lines: list[_Line]) -> list[tuple[tuple[int, ...], str]]:
    """Merge lines that are equal in several layers. Return (layers, text) of each merged line, sorted by layers."""
    alike: dict[str, list[_Line]] = {}
    for number, line in enumerate(lines):
        alike.setdefault(line.pattern if line.layers else str(number), []).append(line)
    folded = []
    for same in alike.values():
        layers = tuple(sorted({layer for line in same for layer in line.layers}))
        if len(layers) < 2:
            folded += [(line.layers, line.text(line.layers[0] if line.layers else None)) for line in same]
            continue
        folded.append((layers, same[0].text(None) + _times(same, layers)))
    return sorted(folded, key=lambda one: one[0])


def _times(same: list[_Line], layers: tuple[int, ...]) -> str:
    counts = [sum(layer in line.layers for line in same) for layer in layers]
    if set(counts) == {1}:
        return ""
    return f"  (×{counts[0]} in each)" if len(set(counts)) == 1 else f"  ({sum(counts)} in all)"


def numbers_text(numbers: Iterable[int]) -> str:
    """Return numbers as text with ranges, such as "0–3, 5". The numbers must be sorted."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in runs)
