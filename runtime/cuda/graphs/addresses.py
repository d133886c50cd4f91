"""Checks that tensors are still where they were at capture: a CUDA graph uses fixed addresses, whatever they hold
now."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ingot.ir.errors import InternalError

# Address, shape and strides.
_Place = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Addresses:
    """Where each tensor was when a CUDA graph was captured.

    what     names the graph in errors
    places   name -> (address, shape, strides) of each tensor
    """

    what: str
    places: Mapping[str, _Place]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], what: str) -> "Addresses":
        return cls(what, {name: _place(tensor) for name, tensor in tensors.items()})

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise InternalError if a tensor has moved since the capture: its address, shape or strides differ, or it is
        not in `tensors`."""
        for name, (address, shape, strides) in self.places.items():
            then = f"{address:#x}, shape {list(shape)}, strides {list(strides)}"
            if name not in tensors:
                raise InternalError(f"'{name}' is gone", where=self.what, expected=f"a tensor at {then}")
            if (now := _place(tensors[name])) != (address, shape, strides):
                raise InternalError(
                    f"'{name}' has moved: it is at {now[0]:#x}, shape {list(now[1])}, strides {list(now[2])}",
                    where=self.what,
                    expected=f"{then}, as at capture",
                    hint="copy into the existing tensor instead of replacing it",
                )


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
