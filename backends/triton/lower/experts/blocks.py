"""The blocks of choices that the kernels of a step's experts take."""

from dataclasses import dataclass
from typing import Any

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.schedule import Value


@dataclass(frozen=True)
class Blocks:
    """The blocks of choices of a step: their grouping, the constants that kernels take, and how many there are.

    `listed` i32[count, LISTED] and `work` i32[WORK] are those of `list_blocks`, for kernels whose programs do not find
    their block themselves.
    """

    choices: int
    order: Value
    counts: Value
    count: Expr
    constants: dict[str, Any]
    listed: Value | None
    work: Value | None

    @property
    def arguments(self) -> dict[str, Value | Expr]:
        return {"order": self.order, "counts": self.counts, "blocks": self.count}
