"""The result of a bisection."""

import enum
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.ir.artifact.record import Rewrite


class Kind(enum.Enum):
    """The place of a fault. HEALTHY: no fault. OVERFLOW: no rewrite; the values themselves exceed the dtype.
    UNCONFIRMED: the first check accuses a pass, the second does not, and nothing else was found."""

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

    `blamed` is the pass, the backend, the recipe's step, or the place in the definition. `rewrite` is the faulty
    rewrite of the pass. `node` is the call (for recipes and weights the param) with right inputs and a wrong result, in
    the program of `entry` and `bucket`; `tensor` is its first wrong value, `origin` the model's source line and `layer`
    its layer. `found` says in words what is wrong, with numbers. `runs` counts the runs of programs. `note` is what the
    user needs to know before acting on the verdict. `reproducer` is a script that reproduces the fault alone; `golden`
    is the program before it as text.
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
        """Return whether there is a confirmed culprit."""
        return self.kind not in (Kind.HEALTHY, Kind.UNCONFIRMED)

    def to_json(self) -> dict[str, Any]:
        value = {**asdict(self), "kind": self.kind.value}
        return {name: str(item) if isinstance(item, Path) else item for name, item in value.items()}
