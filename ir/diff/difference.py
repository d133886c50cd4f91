"""What a diff says: one thing that differs, and all of them together."""

from dataclasses import asdict, dataclass
from typing import Any

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    `what` is an op by its printed name, or "input", "param", "state", "output", "region" or "program". `before` and
    `after` are its names in the two programs, "" where it is not there. For a change `field` names what changed from
    `old` to `new`; what was removed or added stands whole in `old` or `new`. `layers` are those that it lies in, none
    for what stands outside of them, and several for the body of a region that several share. `region` is the name of
    that region.
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
        """The layer, or the first of several."""
        return self.layers[0] if self.layers else None


@dataclass(frozen=True)
class ProgramDiff:
    """All that differs between two programs; falsy when nothing does. `str` prints it, a line for each thing.

    `header` is what differs of the programs as a whole: stage, bucket class, mesh and dims.
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
        """One JSON value: whether the programs are equal, and the differences by kind."""
        parts = {"header": self.header, "changed": self.changed, "added": self.added, "removed": self.removed}
        return {
            "equal": not self,
            **{name: [{**asdict(one), "layers": list(one.layers)} for one in part] for name, part in parts.items()},
        }
