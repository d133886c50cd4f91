"""The types of a diff: one difference, and all differences of two programs."""

from dataclasses import asdict, dataclass
from typing import Any

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """One difference.

    `what` is an op by its printed name, or "input", "param", "state", "output", "region" or "program". `before` and
    `after` are its names in the two programs, "" if it is absent there. For a change, `field` names what changed from
    `old` to `new`; for a removed or added item, `old` or `new` holds its whole line. `layers` holds its layers: none
    outside layers, several for the body of a shared region. `region` is the name of that region.
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
        """Return the layer, or the first of several; None outside layers."""
        return self.layers[0] if self.layers else None


@dataclass(frozen=True)
class ProgramDiff:
    """All differences between two programs; falsy if there are none. `str` prints it, one line per item.

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
        """Return a JSON value: whether the programs are equal, and the differences by kind."""
        parts = {"header": self.header, "changed": self.changed, "added": self.added, "removed": self.removed}
        return {
            "equal": not self,
            **{name: [{**asdict(one), "layers": list(one.layers)} for one in part] for name, part in parts.items()},
        }
