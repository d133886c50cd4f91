"""The result of `ingot bisect`: the kind of fault, the part at fault, and its place in the model."""

import enum
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.ir.artifact.record import Rewrite


class Kind(enum.Enum):
    """The kind of part that bisecting finds at fault, such as a pass or a backend.

    HEALTHY: no fault was found. OVERFLOW: the model's own values exceed its dtype, and no pass is at fault.
    UNCONFIRMED: the prompts of the first check accuse a pass, other prompts do not, and nothing else was found.
    """

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
    """The result of a bisection: which part makes the results wrong, and where.

    blamed       the pass, backend, recipe step, or line of the model definition that is at fault
    rewrite      the faulty rewrite of a pass
    node         the call that computes a wrong result from right inputs, in the program of `entry` and `bucket`;
                 for a recipe or weights, the param
    tensor       the first wrong result of the node
    origin       the node's source line in the model definition
    layer        the node's decoder layer
    found        what is wrong, with numbers
    note         what the user must know before acting on the verdict
    runs         the number of programs that were run
    reproducer   the path of a script that reproduces only this fault
    golden       the path of the reproducer's program before the fault, as text
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
        """Return whether a fault was found and confirmed."""
        return self.kind not in (Kind.HEALTHY, Kind.UNCONFIRMED)

    def to_json(self) -> dict[str, Any]:
        value = {**asdict(self), "kind": self.kind.value}
        return {name: str(item) if isinstance(item, Path) else item for name, item in value.items()}
