"""The types of a diff: one difference, and all differences of two programs."""

from dataclasses import asdict, dataclass
from typing import Any

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """One difference between two programs: a value that was changed, removed or added.

    `what` is the value's op by printed name, or "input", "param", "state", "output", "region" or "program". `before`
    and `after` are the value's names in the two programs, "" if it is absent there. For a change, `field` names what
    changed from `old` to `new`. For a removed or added value, `old` or `new` holds its line of text. `layers` holds the
    model's layers in which it occurs: several for a call in a region that several layers use, none outside layers.
    `region` names the region that contains it; "" if none.
    """

    what: str
    before: str
    after: str
    field: str = ""
    old: str = ""
    new: str = ""
    layers: tuple[int, ...] = ()
    origin: str = ""
    region: str = ""

    @property
    def layer(self) -> int | None:
        """Return the model's layer of the difference, the first of several; None outside layers."""
        return self.layers[0] if self.layers else None


@dataclass(frozen=True)
class ProgramDiff:
    """All differences between two programs; `str` prints a line for each.

    In a condition (`if diff:`) the diff is true if there are differences, and false if the programs are equal. `header`
    holds the differences of the programs as a whole: stage, bucket class (range of step sizes), mesh and bounds of
    symbols.
    """

    changed: tuple[Difference, ...] = ()
    added: tuple[Difference, ...] = ()
    removed: tuple[Difference, ...] = ()
    header: tuple[Difference, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed or self.header)

    def __str__(self) -> str:
        from ingot.ir.diff.text import diff_lines

        return "\n".join(diff_lines(self))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value with "equal" (true or false) and lists of differences.

        The lists are "header", "changed", "added" and "removed".
        """
        parts = {"header": self.header, "changed": self.changed, "added": self.added, "removed": self.removed}
        return {
            "equal": not self,
            **{name: [{**asdict(one), "layers": list(one.layers)} for one in part] for name, part in parts.items()},
        }
