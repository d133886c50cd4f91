"""How the results of a region are made of the outputs of its model, and where the sizes of its symbols are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ingot.ir.parse import parse_type
from ingot.ir.types import TensorType


@dataclass(frozen=True)
class Result:
    """A result of the region: the whole output `source`, or a view of it.

    source   the place of the model's output among all outputs
    view     the type and offset of the view; None: the whole output
    """

    source: int
    view: tuple[TensorType, int] | None

    def taken(self, whole: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        """Return the result, given its output. `sizes` maps symbols such as "T" to sizes."""
        if self.view is None:
            return whole
        wanted, offset = self.view
        shape = wanted.bind(sizes)
        strides = wanted.strides
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        return whole.as_strided(shape, strides, offset)


def read_results(
    described: Sequence[Mapping[str, Any]], types: Sequence[TensorType]
) -> tuple[dict[str, TensorType], list[Result]]:
    """Return the outputs of a model with their types, by name in the model's order, and the results of the region.

    `described` are the results of the model (`ingot.backends.onnx.build.Model`), and `types` the types that the region
    promises for them. Raises KeyError or ValueError if they do not fit each other.
    """
    outputs = {str(one["output"]): parse_type(one["type"]) for one in described}
    places = {name: place for place, name in enumerate(outputs)}
    return outputs, [
        Result(places[one["output"]], _view(wanted, outputs[one["output"]], int(one["offset"])))
        for one, wanted in zip(described, types, strict=True)
    ]


def places_of_symbols(inputs: Sequence[TensorType]) -> dict[str, tuple[int, int]]:
    """Return for each symbol, such as "T", the input and axis that have its size."""
    return {
        size: (place, axis)
        for place, value_type in reversed(list(enumerate(inputs)))
        for axis, size in enumerate(value_type.shape)
        if isinstance(size, str)
    }


def _view(wanted: TensorType, whole: TensorType, offset: int) -> tuple[TensorType, int] | None:
    same = (wanted.shape, wanted.strides, offset) == (whole.shape, None, 0)
    return None if same else (wanted, offset)
