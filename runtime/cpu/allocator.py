"""Memory of a CPU that stays while an artifact is loaded."""

import math
import mmap
from collections.abc import Sequence

import torch


class HostAllocator:
    """Zeros take no memory before they are written: a KV pool is rarely full."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape) * dtype.itemsize
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        try:
            memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(str(error)) from error
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.zeros(shape, dtype)
