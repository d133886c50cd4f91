"""What a bisection finds."""

import enum
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.ir.artifact.record import Rewrite


class Kind(enum.Enum):
    """Where a fault lies. HEALTHY: nowhere. OVERFLOW: in no rewrite, the numbers themselves are too large. UNCONFIRMED:
    one look accuses a pass, the second look does not, and nothing else was found."""

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
    """The culprit of a bisection.

    `blamed` is the pass, the backend, the recipe's step, or the place in the definition. `rewrite` is the one of the
    pass that does harm. `node` is the call (or for recipes and weights the param) whose inputs are right and whose
    result is wrong, in the program of `entry` and `bucket`; `tensor` the first wrong value there, `origin` the model's
    line and `layer` its layer. `found` says in words what is wrong, with numbers. `runs` counts the runs of programs
    that it took. `note` is what else is to be known before anything is done about it. `reproducer` is a script that
    shows the fault by itself, `golden` the program before it as text.
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
        """Whether there is a culprit, which two looks have found."""
        return self.kind not in (Kind.HEALTHY, Kind.UNCONFIRMED)

    def to_json(self) -> dict[str, Any]:
        value = {**asdict(self), "kind": self.kind.value}
        return {name: str(item) if isinstance(item, Path) else item for name, item in value.items()}
