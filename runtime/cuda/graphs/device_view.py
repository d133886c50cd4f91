"""Tensors over memory that other code keeps."""

from dataclasses import dataclass
from typing import Any

import torch


def device_view(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
    """What `tensor` has, as kernels see it: its memory is the device's, or pinned and at one address for both (CUDA C++
    programming guide, "Unified Virtual Address Space").

    With `keep` the memory stays as long as the view; without, the view is of whatever lies there, and keeps nothing.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    raw = torch.as_tensor(_Bytes(tensor.data_ptr(), extent * tensor.itemsize, tensor if keep else None), device="cuda")
    view = raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    assert view.data_ptr() == tensor.data_ptr(), "a copy was made of what is to be shared"
    return view


@dataclass(frozen=True)
class _Bytes:
    """Memory in the words of the CUDA Array Interface, version 3; torch keeps the object as long as the tensor."""

    address: int
    count: int
    owner: torch.Tensor | None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        assert self.count > 0, "nothing to share"
        return {"shape": (self.count,), "typestr": "|u1", "data": (self.address, False), "version": 3}
