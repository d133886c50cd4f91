"""Device tensors over memory that other tensors own."""

from dataclasses import dataclass
from typing import Any

import torch


def device_view(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
    """Return a GPU tensor over the memory of `tensor`, without a copy. That is memory of the GPU or pinned host memory.
    Pinned memory has the same address on the GPU (CUDA C++ programming guide, "Unified Virtual Address Space").

    With `keep`, the returned tensor keeps the memory alive. Without, the memory may be freed and hold other data later.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    raw = torch.as_tensor(_Bytes(tensor.data_ptr(), extent * tensor.itemsize, tensor if keep else None), device="cuda")
    view = raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    assert view.data_ptr() == tensor.data_ptr(), "torch copied memory that must be shared"
    return view


@dataclass(frozen=True)
class _Bytes:
    """A buffer of `count` bytes at `address`, from which torch can make a tensor (CUDA Array Interface, version 3). The
    tensor keeps this object alive. `owner` is the tensor whose memory it is, and so is kept alive too; None: nothing
    keeps the memory."""

    address: int
    count: int
    owner: torch.Tensor | None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        assert self.count > 0, "nothing to share"
        return {"shape": (self.count,), "typestr": "|u1", "data": (self.address, False), "version": 3}
