"""The types of a diff: one difference, and all differences of two programs."""

from dataclasses import asdict, dataclass
from typing import Any

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """One difference between two programs: a value that was changed, removed or added.

    `what` is its op by printed name, or "input", "param", "state", "output", "region" or "program". `before` and
    `after` are its names in the two programs, "" where it is absent. For a change, `field` names what changed from
    `old` to `new`; for a removed or added value, `old` or `new` holds its whole line of text. `layers` is empty outside
    the model's layers, and has several for a call in a region that several layers use. `region` is the name of that
    region.
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
    """All differences between two programs; falsy if there are none. `str` makes one line of each.

    `header` holds the differences of the programs as a whole: stage, bucket class, mesh and dims.
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
        """Return a JSON value: "equal", and lists of differences as "header", "changed", "added" and "removed"."""
        parts = {"header": self.header, "changed": self.changed, "added": self.added, "removed": self.removed}
        return {
            "equal": not self,
            **{name: [{**asdict(one), "layers": list(one.layers)} for one in part] for name, part in parts.items()},
        }
