"""Step inputs: the declarations of the tensors that the host fills for each step. Other code derives from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array, RequestView
from ingot.ir.types import TensorType

NUMPY_DTYPES: Mapping[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
    torch.bool: np.dtype(np.bool_),
}


@dataclass(frozen=True)
class RowTable:
    """A table on the host with values that running sequences request, such as their temperatures.

    It has a row for each device row (row of a running sequence), with one number, or `width` numbers. `of` returns a
    sequence's values, and is called when the sequence gets its row. `nothing` is the value of a free row, and of a
    sequence for which `of` returns None.
    """

    name: str
    dtype: torch.dtype
    nothing: float
    of: Callable[[RequestView], float | Sequence[int] | None]
    width: int | None = None  # values per row; None: one


@dataclass(frozen=True)
class ServedParam:
    """A sampling parameter that takes effect through a step input.

    A request uses it if its value differs from `nothing`, the value without an effect, and `matters(params)` is true
    for the request's sampling parameters.
    """

    name: str
    nothing: float | None
    matters: Callable[[Any], bool] = lambda params: True

    def used_by(self, params: Any) -> bool:
        """Return whether a request with the sampling parameters `params` uses this parameter."""
        return bool(getattr(params, self.name) != self.nothing and self.matters(params))


@dataclass(frozen=True)
class StepInput:
    """The declaration of one input of a step: a tensor that the host fills.

    - `type`: its first axis is T (a value per token), B (sequence), L (row of logits) or G (row of the table of shared
      prefixes).
    - `padding`: the value for padding entries, and for sequences that do not use the input.
    - `fill(array, fed)`: writes the values for the step contents `fed` into an array of the input's shape.
    - `varies`: the values change from step to step even while the same sequences decode. An input that varies and has a
      `table` is filled only if some running sequence uses it.
    - `table`: holds the values that running sequences request; None if requests do not set the input.
    - `known`: the host has the values. If False, the device computes them from its states, and only a program without
      these states takes them from the host.
    - `late`: the model does not read it, only what follows, such as sampling. The host fills it while the model runs,
      once it has the tokens of the previous step.
    - `serves`: sampling parameters that have no effect without the input. If the program lacks the input, the runtime
      rejects a request that uses one of them.
    - `draw`: returns values that requests may use, for tests and debugging, from a number of rows and a generator.
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
        """Return the name of the first axis: "T" (tokens), "B" (sequences), "L" (rows of logits) or "G" (prefixes)."""
        return str(self.type.shape[0])


def request_input(
    name: str,
    value_type: TensorType,
    nothing: float,
    of: Callable[[RequestView], float | Sequence[int] | None],
    draw: Callable[[int, torch.Generator], torch.Tensor] | None = None,
    serves: tuple[ServedParam, ...] = (),
) -> StepInput:
    """Return an input with one value per request, such as its temperature, which stays the same while the request runs.

    nothing   the value for requests that set none, and for rows without a request
    of        returns the value of a request, several if the input has a second axis; None means `nothing`
    draw      returns random values for tests, from a number of rows and a generator; None: tests use `nothing`
    serves    the sampling parameters that have an effect only in programs that take this input
    """
    width = value_type.shape[1] if len(value_type.shape) > 1 else None
    assert width is None or isinstance(width, int)
    table = RowTable(name, value_type.dtype, nothing, of, width)
    by_sequence = value_type.shape[0] == "B"

    def fill(array: Array, fed: Fed) -> None:
        rows = fed.rows if by_sequence else fed.request_rows
        fed.tables[name].take(rows, axis=0, out=array, mode="clip")
        if not by_sequence and fed.has_idle_rows:
            array[rows < 0] = nothing

    return StepInput(name, value_type, nothing, fill, table=table, serves=serves, draw=draw)


def one_of(dtype: torch.dtype, *values: float) -> Callable[[int, torch.Generator], torch.Tensor]:
    """Return a function that picks one of `values` at random for each row, for the field `draw` of a `StepInput`.

    The function takes a number of rows and a generator.
    """

    def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
        chosen = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=torch.float64)[chosen].to(dtype)

    return draw
