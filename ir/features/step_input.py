"""What one step takes from the host: each input is declared once, and all that handles inputs derives from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ingot.ir.features.asking import Array, Asking
from ingot.ir.features.fed import Fed
from ingot.ir.types import TensorType

NUMPY_DTYPES: Mapping[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
    torch.bool: np.dtype(np.bool_),
}


@dataclass(frozen=True)
class RowTable:
    """A number, or several, that the host keeps for each device row while a sequence has it.

    `of` gives the values when a sequence gets its row; None stands for `nothing`, which is what an empty row has.
    """

    name: str
    dtype: torch.dtype
    nothing: float
    of: Callable[[Asking], float | Sequence[int] | None]
    width: int | None = None  # values of a row; None: one


@dataclass(frozen=True)
class ServedParam:
    """A sampling parameter that a step input serves. A request asks for it where its value differs from `nothing`;
    `matters` says of its sampling parameters whether the value has any effect."""

    name: str
    nothing: float | None
    matters: Callable[[Any], bool] = lambda params: True

    def asked_by(self, params: Any) -> bool:
        """Whether a request of these sampling parameters asks for it."""
        return bool(getattr(params, self.name) != self.nothing and self.matters(params))


@dataclass(frozen=True)
class StepInput:
    """One input of a step.

    `type` has T, B, L or G in front: a value for each token, sequence or row of logits, or row of the table of shared
    prefixes. `padding` is what a place holds
    that no sequence has, and what a sequence has that asks for nothing. `fill(array, fed)` writes the values of a step
    into an array of its shape. `varies`: they differ from step to step even while the same sequences decode; an input
    that varies and has a `table` is filled only where some running sequence asks for it. `table` keeps by device row
    what sequences ask for. `known`: the host has it; else rows of state tell it, and only a program without them takes
    it from the host. `late`: the ending alone reads it, and it is filled once the tokens of the step before are known,
    while the forward segment runs. `serves` are the sampling parameters that have no effect where an entry does not
    take the input: a request that asks for one is refused there. `draw` gives values that requests may ask for, to
    tests and to debugging: of so many rows, from a generator.
    """

    name: str
    type: TensorType
    padding: float
    fill: Callable[[Array, Fed], None]
    varies: bool = False
    table: RowTable | None = None
    known: bool = True
    late: bool = False
    serves: tuple[ServedParam, ...] = ()
    draw: Callable[[int, torch.Generator], torch.Tensor] | None = None

    @property
    def dim(self) -> str:
        """What has a value each: "T", "B", "L" or "G"."""
        return str(self.type.shape[0])


def asked(
    name: str,
    value_type: TensorType,
    nothing: float,
    of: Callable[[Asking], float | Sequence[int] | None],
    draw: Callable[[int, torch.Generator], torch.Tensor] | None = None,
    serves: tuple[ServedParam, ...] = (),
) -> StepInput:
    """An input that a sequence asks for when it begins to run, and that stays as it is until it ends."""
    width = value_type.shape[1] if len(value_type.shape) > 1 else None
    assert width is None or isinstance(width, int)
    table = RowTable(name, value_type.dtype, nothing, of, width)
    by_sequence = value_type.shape[0] == "B"

    def fill(array: Array, fed: Fed) -> None:
        rows = fed.rows if by_sequence else fed.asking
        fed.tables[name].take(rows, axis=0, out=array, mode="clip")
        if not by_sequence and fed.has_idle_rows:
            array[rows < 0] = nothing

    return StepInput(name, value_type, nothing, fill, table=table, serves=serves, draw=draw)


def one_of(dtype: torch.dtype, *values: float) -> Callable[[int, torch.Generator], torch.Tensor]:
    """A `draw` that takes any of these for each row."""

    def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
        chosen = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=torch.float64)[chosen].to(dtype)

    return draw
