"""The result of `ingot bisect`: the kind of fault, the part at fault, and its place in the model."""

import enum
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.ir.artifact.record import Rewrite


class Kind(enum.Enum):
    """The kind of part that is at fault, such as a pass or a backend.

    HEALTHY: no fault was found. OVERFLOW: values of the model are too large for its dtype, and no pass is at fault.
    UNCONFIRMED: a pass is at fault on the first prompts but not on others, and nothing else was found.
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

    blamed       the faulty part: a pass, a backend, a recipe step, or a line of the model definition
    rewrite      the faulty rewrite of a pass
    entry        the entry (such as `main` or a draft model) with the fault
    bucket       the bucket class (a range of step sizes) of the faulty program
    node         the call that computes a wrong result from right inputs; for a recipe or weights, the param
    op           the op of the node
    tensor       the first wrong result of the node
    origin       the source line of the node in the model definition
    layer        the decoder layer of the node
    found        what is wrong, with numbers
    note         what the user must know before acting on the verdict
    runs         the number of programs that were run
    reproducer   the path of a script that reproduces only this fault
    golden       the path of the program in the reproducer, as text: before the pass, or the faulty call
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
