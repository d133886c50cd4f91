"""The blocks of choices that the kernels of a step's experts take."""

from dataclasses import dataclass
from typing import Any

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.schedule import Value


@dataclass(frozen=True)
class Blocks:
    """The blocks of choices of a step: their grouping, the constants that kernels take, and how many there are.

    `listed` i32[count, LISTED] says which block a program takes (`list_blocks`), for kernels that do not find it
    themselves.
    """

    choices: int
    order: Value
    counts: Value
    count: Expr
    constants: dict[str, Any]
    listed: Value | None

    @property
    def arguments(self) -> dict[str, Value | Expr]:
        return {"order": self.order, "counts": self.counts, "blocks": self.count}
