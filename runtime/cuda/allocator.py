"""Memory of a GPU that stays while an artifact is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class DeviceAllocator:
    """Takes memory from torch's allocator on `device`. Zeros are written on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._said():
            return torch.zeros(shape, dtype=dtype, device=self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._said():
            return torch.empty(shape, dtype=dtype, device=self._device)

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise MemoryError(f"of {total} bytes on the GPU {free} are free") from error
