"""The context of loading an artifact: what each backend's loader receives about its device and the mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.ir.mesh import Mesh, Rank


class Allocator(Protocol):
    """Allocates tensors that stay on the device while the artifact is loaded: weights, states, and memory that loaded
    code keeps between calls.

    All methods raise MemoryError, with the reason as its text, if there is no memory.
    """

    @property
    def granularity(self) -> int | None:
        """Return the unit, in bytes, in which memory is mapped into address ranges; None if the device cannot map
        memory."""
        ...

    def with_shared_tail(self, count: int, own: int, tail: int) -> list[torch.Tensor]:
        """Return `count` tensors of `own + tail` bytes (u8), zeros, that share the memory of their last `tail` bytes.
        Both are multiples of the granularity, and above 0."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a row-major tensor of zeros."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized row-major tensor."""
        ...


@dataclass(frozen=True)
class LoadContext:
    """The place of one process among those that serve an artifact.

    device         the device of code, weights and states
    rank           this process's place on `mesh`; the process loads its parts of the weights
    mesh           the mesh that the artifact was compiled for, without axes of one device
    stream         the stream of all steps of all entries, in the order of their launches; None on a CPU
    communicators  by mesh axis, the object that joins the ranks along it; empty without a mesh
    allocator      allocates the memory that stays on the device
    """

    device: torch.device
    rank: Rank
    mesh: Mesh
    stream: torch.cuda.Stream | None
    communicators: Mapping[str, object]
    allocator: Allocator
