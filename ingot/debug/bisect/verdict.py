"""The result of `ingot bisect`: the kind of fault, the part at fault, and its place in the model."""

import enum
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.ir.artifact.record import Rewrite


class Kind(enum.Enum):
    """The kind of part that is at fault. HEALTHY: no fault was found. OVERFLOW: the model's own values exceed its
    dtype, and no pass is at fault. UNCONFIRMED: the first check accuses a pass, the second does not, and nothing else
    was found."""

    HEALTHY = "healthy"
    PASS = "pass"
    BACKEND = "backend"
    RECIPE = "recipe"
    WEIGHTS = "weights"
    PLAN = "plan"
    DEFINITION = "definition"
    OVERFLOW = "overflow"
    UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True)
class Verdict:
    """The result of a bisection: the part that makes the results wrong.

    `blamed` is the pass, the backend, the recipe's step, or the place in the definition. `rewrite` is the faulty
    rewrite of a pass. `node` is the call that computes a wrong result from right inputs, in the program of `entry` and
    `bucket`; for a recipe or weights it is the param. `tensor` is its first wrong value, `origin` the model's source
    line, and `layer` its layer. `found` says what is wrong, with numbers. `note` is what the user must know before
    acting on the verdict. `runs` counts the programs that were run. `reproducer` is a script that reproduces the fault
    alone; `golden` is its program before the fault, as text.
    """

    kind: Kind
    blamed: str = ""
    entry: str = "main"
    bucket: str | None = None
    rewrite: Rewrite | None = None
    node: str = ""
    op: str = ""
    tensor: str = ""
    layer: int | None = None
    origin: str = ""
    found: str = ""
    note: str = ""
    runs: int = 0
    reproducer: Path | None = None
    golden: Path | None = None

    def __bool__(self) -> bool:
        """Return whether a confirmed fault was found."""
        return self.kind not in (Kind.HEALTHY, Kind.UNCONFIRMED)

    def to_json(self) -> dict[str, Any]:
        value = {**asdict(self), "kind": self.kind.value}
        return {name: str(item) if isinstance(item, Path) else item for name, item in value.items()}
