"""The connection of the GPUs of one mesh axis through NCCL, on torch's current stream, also inside CUDA graphs."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ingot.backends.collectives import sum_in_order
from ingot.backends.nccl.library import SUMMED, UNIQUE_ID_BYTES, Nccl, load_nccl
from ingot.backends.nccl.meeting import find, leave
from ingot.backends.torch_cuda import current_stream
from ingot.ir.errors import BackendError, RankError
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.load_context import Communicator
from ingot.ir.machine.meeting import MeetingPlace

# How long `abort` waits for a call of another thread. NCCL's calls only enqueue work, except the first ones, which
# connect; those end by themselves when a peer's sockets close.
_CALL_SECONDS = 1.0


class Beside(Protocol):
    """Kernels of another backend that wait for the ranks of this connection too."""

    def abort(self) -> None:
        """End the kernels that wait for other ranks."""
        ...

    def check(self) -> None:
        """Raise RankError if a kernel has ended without a result."""
        ...


class NcclCommunicator(Communicator):
    """Connects the GPUs of one mesh axis. Each is the current GPU of its process.

    meeting  where the processes meet
    name     identifies the group of processes there
    place    this rank's index on the axis
    size     the number of ranks on the axis

    one_host (attribute) whether all ranks of the axis are on one host
    shares   (attribute) what another backend shares with the same ranks; None: it found that they can share nothing

    The constructor waits for all processes of the group. The methods enqueue work on torch's current stream, and a CUDA
    graph can capture them. Raises BackendError if the processes do not connect, and TargetError if they differ in GPU,
    driver or versions.
    """

    one_host = True

    def __init__(self, meeting: MeetingPlace, name: str, place: int, size: int) -> None:
        nccl = load_nccl(meeting.address)
        if place == 0:
            identity = nccl.unique_id()
            leave(meeting, name, identity, facts(nccl))
        else:
            identity = find(meeting, name, facts(nccl))
        self.one_host = meeting.one_host
        self._connect(nccl, identity, place, size, current_stream)

    def _connect(
        self, nccl: Nccl, identity: bytes, place: int, size: int, stream: Callable[[torch.device], int]
    ) -> None:
        self.place, self.size = place, size
        self._nccl, self._stream = nccl, stream
        self._lock = threading.Lock()
        self._comm = nccl.init_rank(size, identity, place)
        self._aborted = False
        self.shares: list[Beside | None] = []
        self._others: list[NcclCommunicator] = []
        # Without a fault, the communicator is freed with this object. Not at exit, when the driver may be gone.
        self._end = weakref.finalize(self, _abort_apart, nccl, self._comm, self._lock)
        self._end.atexit = False

    @classmethod
    def over(
        cls, nccl: Nccl, identity: bytes, place: int, size: int, stream: Callable[[torch.device], int]
    ) -> "NcclCommunicator":
        """Connect through given functions. `stream` returns the current stream of a device."""
        made = cls.__new__(cls)
        made._connect(nccl, identity, place, size, stream)
        return made

    @property
    def alive(self) -> bool:
        return not self._aborted

    def second(self, device: torch.device) -> "NcclCommunicator":
        identity = self._nccl.unique_id() if self.place == 0 else bytes(UNIQUE_ID_BYTES)
        sent = torch.tensor(list(identity), dtype=torch.uint8, device=device)
        first = bytes(self.gathered(sent)[0].tolist())  # waits for the GPU
        made = NcclCommunicator.over(self._nccl, first, self.place, self.size, self._stream)
        self._others.append(made)
        if self._aborted:  # while the second one was made
            made.abort()
        return made

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(self.gathered(x))

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` of each rank, stacked along a new first axis."""
        x = x.contiguous()
        found = x.new_empty((self.size, *x.shape))
        self._call(x, self._nccl.all_gather, x.data_ptr(), found.data_ptr(), x.nbytes)
        return found

    def send(self, x: torch.Tensor, place: int) -> None:
        x = x.contiguous()
        self._call(x, self._nccl.send, x.data_ptr(), x.nbytes, place)

    def receive(self, into: torch.Tensor, place: int) -> None:
        self._call(into, self._nccl.receive, into.data_ptr(), into.nbytes, place)

    def exchange(self, parts: torch.Tensor) -> list[torch.Tensor]:
        found = list(torch.empty_like(parts))
        stream = self._stream(parts.device)
        with self._lock:
            self.check()
            self._nccl.group_start()
            try:
                for place, (part, into) in enumerate(zip(parts, found, strict=True)):
                    self._nccl.send(part.data_ptr(), part.nbytes, place, self._comm, stream)
                    self._nccl.receive(into.data_ptr(), into.nbytes, place, self._comm, stream)
            finally:
                self._nccl.group_end()
        return found

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the ranks: added in their order in float32 or wider, and rounded once.

        NCCL adds two values exactly so: with 11 or fewer bits of precision, rounding a sum of two to 24 bits first
        changes nothing. It would round each sum of more than two, in an order that depends on the size.
        """
        x = x.contiguous()
        if self.size == 2 and x.dtype in SUMMED:
            made = torch.empty_like(x)
            self._call(x, self._nccl.all_reduce, x.data_ptr(), made.data_ptr(), x.numel(), x.dtype)
            return made
        # Each rank adds one part of the elements, so that a rank sends no more than in a ring.
        each = -(-x.numel() // self.size)
        flat = x.new_zeros(each * self.size)
        flat[: x.numel()] = x.reshape(-1)
        own = sum_in_order(self.exchange(flat.view(self.size, each)))
        return self.gathered(own).view(-1)[: x.numel()].view(x.shape)

    def part_of_total(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum of `parts[place]` over the ranks, for this rank's place. It adds and rounds as `total` does.

        `parts` [size, …] is row-major, and has one shape and dtype on all ranks.
        """
        if self.size != 2 or parts.dtype not in SUMMED:
            return sum_in_order(self.exchange(parts))
        made = torch.empty_like(parts[0])
        self._call(parts, self._nccl.reduce_scatter, parts.data_ptr(), made.data_ptr(), made.numel(), made.dtype)
        return made

    def check(self) -> None:
        super().check()
        for one in self.shares:
            if one is not None:
                one.check()

    def abort(self) -> None:
        self._aborted = True
        for other in self._others:
            other.abort()
        for one in self.shares:
            if one is not None:
                one.abort()
        self._end()  # once

    def _call(self, x: torch.Tensor, function: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            self.check()
            function(*arguments, self._comm, self._stream(x.device))


def _abort_apart(nccl: Nccl, comm: int, lock: threading.Lock) -> None:
    """Abort a communicator in a thread of its own.

    NCCL tells its kernels to end at once. It then waits until no CUDA graph holds the communicator, so the thread may
    live as long as the executor.
    """

    def run() -> None:
        if lock.acquire(timeout=_CALL_SECONDS):
            lock.release()
        with contextlib.suppress(RankError, BackendError):  # the fault that led here is reported
            nccl.abort(comm)

    threading.Thread(target=run, name="abort NCCL", daemon=True).start()


def facts(nccl: Nccl) -> dict[str, str]:
    """Return what must be equal on all ranks of a group."""
    gpu = find_gpu()
    return {
        "the GPU": gpu.product,
        "the driver's CUDA version": gpu.driver or "unknown",
        "the version of torch": torch.__version__,
        "the version of NCCL": nccl.version(),
    }
