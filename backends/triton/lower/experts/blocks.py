"""The blocks of choices that the kernels of a step's experts take."""

from dataclasses import dataclass
from typing import Any

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.schedule import Value


@dataclass(frozen=True)
class Blocks:
    """The blocks of choices of a step: their grouping, the constants that kernels take, and how many there are."""

    choices: int
    order: Value
    counts: Value
    count: Expr
    constants: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Value | Expr]:
        return {"order": self.order, "counts": self.counts, "blocks": self.count}
