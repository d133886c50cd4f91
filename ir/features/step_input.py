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

    name     the table's name
    dtype    the dtype of its values
    nothing  the value of a free row, and of a sequence for which `of` returns None
    of       returns the values of a sequence; it is called when the sequence gets its row
    width    the number of values per row; None: one
    """

    name: str
    dtype: torch.dtype
    nothing: float
    of: Callable[[RequestView], float | Sequence[int] | None]
    width: int | None = None  # values per row; None: one


@dataclass(frozen=True)
class ServedParam:
    """A sampling parameter that has an effect only through a step input.

    name     the parameter's name
    nothing  its value without an effect
    matters  returns whether the parameter has an effect, given all sampling parameters of a request; a greedy request
             ignores top_p, for example
    """

    name: str
    nothing: float | tuple[()] | None
    matters: Callable[[Any], bool] = lambda params: True

    def used_by(self, params: Any) -> bool:
        """Return whether a request with the sampling parameters `params` uses this parameter."""
        return bool(getattr(params, self.name) != self.nothing and self.matters(params))


@dataclass(frozen=True)
class StepInput:
    """An input of a step: a tensor that the host fills.

    - `type`: its type. The first axis is T (a value per token), B (per sequence), L (per row of logits) or G (per row
      of the table of shared prefixes).
    - `padding`: the value for padding, and for sequences that do not use the input.
    - `fill(array, fed)`: writes the values into an array of the input's shape. `fed` holds the contents of the step.
    - `varies`: whether values change between steps in which the same sequences decode. An input that varies and has a
      `table` is filled only if a running sequence uses it.
    - `table`: the values that running sequences request. None: requests do not set the input.
    - `known`: whether the host knows the values. If not, the device computes them from states. A program without these
      states still takes them from the host.
    - `late`: whether only the calls after the model read it, such as sampling. The host fills it while the model runs,
      when it has the tokens of the previous step.
    - `serves`: sampling parameters that have an effect only through this input. If the program lacks the input, the
      runtime rejects requests that use them.
    - `draw`: returns random request values for tests and debugging, from a number of rows and a generator.
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
        """Return the first axis: "T" (tokens), "B" (sequences), "L" (rows of logits) or "G" (shared prefixes)."""
        return str(self.type.shape[0])


def request_input(
    name: str,
    value_type: TensorType,
    nothing: float,
    of: Callable[[RequestView], float | Sequence[int] | None],
    draw: Callable[[int, torch.Generator], torch.Tensor] | None = None,
    serves: tuple[ServedParam, ...] = (),
) -> StepInput:
    """Return a step input for a request's value, such as its temperature. The value is constant while the request runs.

    nothing   the value for requests that set none, and for rows without a request
    of        returns a request's value, or several if the input has a second axis; None means `nothing`
    draw      returns random values for tests, from a number of rows and a generator; None: tests use `nothing`
    serves    the sampling parameters that have an effect only through this input
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
    """Return a function that chooses one of `values` at random for each row. Use it as `draw` of a `StepInput`.

    The function takes a number of rows and a generator.
    """

    def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
        chosen = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=torch.float64)[chosen].to(dtype)

    return draw
