"""The context in which an artifact is loaded: the device, mesh and memory that each backend's loader receives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.ir.errors import RankError
from ingot.ir.mesh import Mesh, Rank


class Allocator(Protocol):
    """Allocates tensors that stay on the device while the artifact is loaded.

    These are weights, states, and memory that loaded code keeps between calls. All methods raise MemoryError with a
    reason if there is not enough memory.
    """

    @property
    def granularity(self) -> int | None:
        """Return the unit, in bytes, in which the device maps memory into address ranges.

        None if the device cannot map one piece of memory into several address ranges.
        """
        ...

    def with_shared_tail(self, count: int, own: int, tail: int) -> list[torch.Tensor]:
        """Return `count` u8 tensors of zeros that share the memory of their last `tail` bytes.

        Before these, each tensor has `own` bytes to itself. `own` and `tail` are multiples of `granularity`, and above
        0. Caches with scratch pages use this.
        """
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new row-major tensor of zeros on the device."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new row-major tensor on the device. Its values are undefined."""
        ...


class Communicator(Protocol):
    """Connects this rank with the other ranks of one mesh axis. All ranks must make the same calls in the same order.

    place   this rank's index on the axis
    size    the number of ranks on the axis

    On a GPU, calls enqueue work on torch's current stream, and do not wait for it. All methods raise RankError if
    another rank is gone.
    """

    place: int
    size: int

    @property
    def alive(self) -> bool:
        """Return whether `abort` was not called yet."""
        return True

    def check(self) -> None:
        """Raise RankError if calls on the device ended without a result, or later ones would: another rank is gone."""
        if not self.alive:
            raise RankError("the connection to the other ranks was ended, because one of them is gone")

    def abort(self) -> None:
        """End the calls that wait for other ranks, in the host and on the device. Later calls raise RankError.

        Any thread may call it, when a rank is gone. Connections that break with the processes of their ranks need
        nothing.
        """
        return

    def second(self, device: torch.device) -> "Communicator":
        """Return a connection of the same ranks, whose calls need no common order with those of this one.

        All ranks must call it. Connections that do not wait in a stream of `device` return themselves.
        """
        return self

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x` of each rank, in their order. It has the same shape and dtype on all ranks."""
        ...

    def exchange(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Send `parts[r]` to each rank r, and return what each rank sends here, in their order.

        `parts` [size, …] is row-major, and has one shape and dtype on all ranks.
        """
        ...

    def send(self, x: torch.Tensor, place: int) -> None:
        """Send `x` to the rank with index `place`, which must receive it. This may return before it has; `x` may
        change then."""
        ...

    def receive(self, into: torch.Tensor, place: int) -> None:
        """Receive a tensor of the shape and dtype of `into`, which is row-major, from the rank with index `place`."""
        ...


@dataclass(frozen=True)
class LoadContext:
    """The facts about this process and its device that are needed to load an artifact.

    device         the device of code, weights and states
    rank           which rank of `mesh` this process is; it loads this rank's parts of the weights
    mesh           the mesh that the artifact was compiled for, without axes of size 1
    stream         the CUDA stream on which all steps run; None on a CPU
    communicators  by mesh axis, the connection of its ranks; empty without a mesh
    allocator      allocates the memory that stays on the device
    """

    device: torch.device
    rank: Rank
    mesh: Mesh
    stream: torch.cuda.Stream | None
    communicators: Mapping[str, Communicator]
    allocator: Allocator
