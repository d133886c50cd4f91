"""The types of a diff: one difference, and all differences of two programs."""

from dataclasses import asdict, dataclass
from typing import Any

ABSENT = "–"


@dataclass(frozen=True)
class Difference:
    """One difference between two programs: a value that was changed, removed or added.

    what    the value's op by name, or "input", "param", "state", "output", "region" or "program"
    before  the value's name in the first program; "" if it was added
    after   the value's name in the second program; "" if it was removed
    field   what changed in it; "" if it was added or removed
    old     the old text of `field`, or the line of a removed value
    new     the new text of `field`, or the line of an added value
    layers  the model's layers with this difference; several if layers share a region; empty outside layers
    region  the name of the region (calls that are compiled together) around it; "" outside regions
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
        """Return the first of the model's layers with this difference; None outside layers."""
        return self.layers[0] if self.layers else None


@dataclass(frozen=True)
class ProgramDiff:
    """All differences between two programs. `str` prints a line for each.

    As a condition (`if diff:`), it is true if there are differences. `header` holds the differences of whole programs:
    stage, bucket class (range of step sizes), mesh, and bounds of symbols.
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
        """Return the diff as a JSON value.

        "equal" is true or false. "header", "changed", "added" and "removed" are lists of differences.
        """
        parts = {"header": self.header, "changed": self.changed, "added": self.added, "removed": self.removed}
        return {
            "equal": not self,
            **{name: [{**asdict(one), "layers": list(one.layers)} for one in part] for name, part in parts.items()},
        }
