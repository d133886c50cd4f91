"""Where an artifact is loaded: what every loader of a backend receives about its device and of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.ir.mesh import Mesh, Rank


class Allocator(Protocol):
    """Allocates tensors that stay on the device as long as the artifact is loaded: weights, states, and what loaded
    code keeps between calls.

    All raise MemoryError where there is no memory, with the reason as its text.
    """

    @property
    def granularity(self) -> int | None:
        """Bytes in multiples of which memory is mapped into ranges of addresses; None: the device cannot do that."""
        ...

    def with_shared_tail(self, count: int, own: int, tail: int) -> list[torch.Tensor]:
        """`count` tensors of `own + tail` bytes (u8), zeros, whose last `tail` bytes are the same memory. Both are
        multiples of the granularity, and above 0."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A row-major tensor of zeros."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A row-major tensor that holds anything."""
        ...


@dataclass(frozen=True)
class LoadContext:
    """The place of one process among those that serve an artifact.

    device         where code, weights and states go
    rank           this process's place on `mesh`; weights are its parts
    mesh           the mesh that the artifact was compiled for, without axes of one device
    stream         where all steps of all entries run, in the order of their launches; None on a CPU
    communicators  by axis of the mesh, what joins the ranks along it; empty where the mesh has no axis
    allocator      allocates what stays on the device
    """

    device: torch.device
    rank: Rank
    mesh: Mesh
    stream: torch.cuda.Stream | None
    communicators: Mapping[str, object]
    allocator: Allocator
