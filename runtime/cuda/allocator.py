"""Allocation of GPU memory for weights and states, which stay while an artifact is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from ingot.runtime.cuda import shared_tail


class DeviceAllocator:
    """Allocates memory of the GPU `device`, for weights and for states such as KV caches. The memory comes from torch's
    allocator, or from the CUDA driver for tensors that share a part of it. Zeros are written on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._memory_errors():
            return torch.zeros(shape, dtype=dtype, device=self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._memory_errors():
            return torch.empty(shape, dtype=dtype, device=self._device)

    @cached_property
    def granularity(self) -> int | None:
        return shared_tail.granularity(self._device)

    def with_shared_tail(self, count: int, own: int, tail: int) -> list[torch.Tensor]:
        with self._memory_errors():
            return shared_tail.with_shared_tail(self._device, count, own, tail)

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Turn an out-of-memory error inside the `with` block into a MemoryError. It says how much memory of the GPU is
        free."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise MemoryError(f"of {total} bytes on the GPU {free} are free") from error
