"""Allocation of CPU memory for weights and states, which stay while an artifact is loaded."""

import math
import mmap
from collections.abc import Sequence

import torch

from ingot.runtime.cpu import shared_tail


class HostAllocator:
    """Allocates CPU memory for weights, and for states such as KV caches. The memory is zero. It takes no physical
    memory until it is written, so a KV cache that is rarely full takes little."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape) * dtype.itemsize
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        try:
            memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(str(error)) from error
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    @property
    def granularity(self) -> int | None:
        return shared_tail.granularity()

    def with_shared_tail(self, count: int, own: int, tail: int) -> list[torch.Tensor]:
        return shared_tail.with_shared_tail(count, own, tail)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.zeros(shape, dtype)
