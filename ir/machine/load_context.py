"""The context in which an artifact is loaded: the device, mesh and memory that each backend's loader receives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.ir.mesh import Mesh, Rank


class Allocator(Protocol):
    """Allocates tensors that stay on the device as long as the artifact is loaded.

    These are weights, states, and memory that loaded code keeps between calls. All methods raise MemoryError, with the
    reason as its text, if there is not enough memory.
    """

    @property
    def granularity(self) -> int | None:
        """Return the unit, in bytes, in which the device maps memory into address ranges.

        None if the device cannot map the same memory into several ranges.
        """
        ...

    def with_shared_tail(self, count: int, own: int, tail: int) -> list[torch.Tensor]:
        """Return `count` u8 tensors of zeros that share the memory of their last bytes, for caches with scratch pages.

        Each tensor has `own` bytes of its own, then `tail` bytes that are the same memory in all tensors. `own` and
        `tail` are multiples of `granularity`, and above 0.
        """
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new row-major tensor on the device, filled with zeros."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new row-major tensor on the device, uninitialized."""
        ...


@dataclass(frozen=True)
class LoadContext:
    """The facts about this process and its device that loading an artifact needs.

    device         the device of code, weights and states
    rank           which rank of `mesh` this process is; it loads this rank's parts of the weights
    mesh           the mesh that the artifact was compiled for, without axes of size 1
    stream         the CUDA stream on which all steps run; None on a CPU
    communicators  by mesh axis, the object (such as an NCCL communicator) that connects its ranks; empty without a mesh
    allocator      allocates the memory that stays on the device
    """

    device: torch.device
    rank: Rank
    mesh: Mesh
    stream: torch.cuda.Stream | None
    communicators: Mapping[str, object]
    allocator: Allocator
