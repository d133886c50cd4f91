"""NCCL's functions over host memory: the ranks are threads, and addresses are those of CPU tensors.

It computes what nccl.h says, and checks what NCCL requires: equal calls on all ranks, and no call after an abort.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.backends.nccl.library import SIGNATURES, Nccl
from ingot.ir.errors import RankError

SECONDS = 20.0
_ELEMENTS = {1: np.uint8, 6: np.float16, 7: np.float32, 8: np.float64, 9: np.uint16}  # by ncclDataType_t


def _widened(array: np.ndarray, dtype: int) -> np.ndarray:
    """The values as float64; bfloat16 is the upper half of float32."""
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64) if dtype == 9 else array.astype(float)


def _narrowed(array: np.ndarray, dtype: int) -> np.ndarray:
    if dtype != 9:
        return array.astype(_ELEMENTS[dtype])
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even


class _Group:
    """What the ranks of a communicator share: a barrier for calls, one for the start, and the calls of each.

    An abort breaks the first barrier alone: a rank may abort while another one still leaves the start."""

    def __init__(self, size: int) -> None:
        self.barrier, self.started = threading.Barrier(size), threading.Barrier(size)
        self.calls: list[Any] = [None] * size


class FakeNccl:
    """A library like libnccl.so.2 for threads of this process. `fails` maps a function's name to a status."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.called: list[tuple[int, str]] = []  # (place, function), in order for each place
        self._groups: dict[bytes, _Group] = {}
        self._ranks: dict[int, tuple[_Group, int]] = {}  # by the handle of a communicator
        self._lock = threading.Lock()
        self._pending = threading.local()
        for name in SIGNATURES:
            setattr(self, name, self._function(name))
        self.ncclGetErrorString = self._function("ncclGetErrorString")

    def _function(self, name: str) -> Any:
        body = getattr(self, "_" + name)

        def call(*arguments: Any) -> Any:
            if name in SIGNATURES:
                assert len(arguments) == len(SIGNATURES[name]), name
            return self.fails[name] if name in self.fails else body(*arguments)

        return call  # a function, which takes the attributes argtypes and restype

    def _ncclGetErrorString(self, status: int) -> bytes:
        return {2: b"unhandled system error", 6: b"remote process exited", 5: b"invalid usage"}[status]

    def _ncclGetVersion(self, version: Any) -> int:
        version._obj.value = 22703
        return 0

    def _ncclGetUniqueId(self, made: Any) -> int:
        with self._lock:
            number = len(self._groups) + 1
            self._groups[number.to_bytes(128, "little")] = _Group(0x7FFF)
        ctypes.memmove(ctypes.addressof(made._obj), number.to_bytes(128, "little"), 128)
        return 0

    def _ncclCommInitRank(self, comm: Any, size: int, unique_id: Any, place: int) -> int:
        key = bytes(unique_id)
        with self._lock:
            if self._groups[key].barrier.parties != size:
                self._groups[key] = _Group(size)
            handle = 1000 + len(self._ranks)
            self._ranks[handle] = self._groups[key], place
        comm._obj.value = handle
        self._groups[key].started.wait(SECONDS)
        return 0

    def _ncclCommAbort(self, comm: int) -> int:
        group, place = self._ranks.pop(comm)
        self.called.append((place, "ncclCommAbort"))
        group.barrier.abort()
        return 0

    def _ncclGroupStart(self) -> int:
        self._pending.calls = []
        return 0

    def _ncclGroupEnd(self) -> int:
        calls, self._pending.calls = self._pending.calls, None
        return self._meet(calls[0][0], "group", [call[1:] for call in calls])

    def _ncclSend(self, source: int, count: int, dtype: int, place: int, comm: int, stream: int) -> int:
        return self._point(comm, ("send", source, count, place))

    def _ncclRecv(self, target: int, count: int, dtype: int, place: int, comm: int, stream: int) -> int:
        return self._point(comm, ("receive", target, count, place))

    def _point(self, comm: int, call: tuple[Any, ...]) -> int:
        assert comm in self._ranks, "a call after an abort"
        if getattr(self._pending, "calls", None) is not None:
            self._pending.calls.append((comm, *call))
            return 0
        return self._meet(comm, "group", [call])

    def _ncclAllGather(self, source: int, target: int, count: int, dtype: int, comm: int, stream: int) -> int:
        return self._meet(comm, "gather", (source, target, count))

    def _ncclAllReduce(
        self, source: int, target: int, count: int, dtype: int, operation: int, comm: int, stream: int
    ) -> int:
        assert operation == 0
        return self._meet(comm, "reduce", (source, target, count, dtype))

    def _ncclReduceScatter(
        self, source: int, target: int, count: int, dtype: int, operation: int, comm: int, stream: int
    ) -> int:
        assert operation == 0
        return self._meet(comm, "reduce part", (source, target, count, dtype))

    def _meet(self, comm: int, kind: str, call: Any) -> int:
        """Wait for the same call of all ranks, then do this rank's part. It fails if another rank aborts."""
        assert comm in self._ranks, "a call after an abort"
        group, place = self._ranks[comm]
        self.called.append((place, kind))
        group.calls[place] = kind, call
        try:
            group.barrier.wait(SECONDS)
            assert {one for one, _ in group.calls} == {kind}, "ranks call different functions"
            parts: dict[str, Callable[..., None]] = {
                "gather": _gather,
                "reduce": _reduce,
                "reduce part": _reduce_part,
                "group": _deliver,
            }
            parts[kind](place, [one for _, one in group.calls])
            group.barrier.wait(SECONDS)
        except threading.BrokenBarrierError:
            return 6
        return 0


def _array(address: int, count: int, dtype: int = 1) -> np.ndarray:
    kind = np.dtype(_ELEMENTS[dtype])
    memory = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind)


def _gather(place: int, calls: list[Any]) -> None:
    target, count = calls[place][1:]
    _array(target, count * len(calls))[:] = np.concatenate([_array(source, count) for source, *_ in calls])


def _reduce(place: int, calls: list[Any]) -> None:
    _, target, count, dtype = calls[place]
    total = sum(_widened(_array(source, count, dtype), dtype) for source, *_ in calls)
    _array(target, count, dtype)[:] = _narrowed(np.asarray(total), dtype)


def _reduce_part(place: int, calls: list[Any]) -> None:
    """Each rank gets `count` elements of the sum: those of its place."""
    _, target, count, dtype = calls[place]
    own = slice(place * count, (place + 1) * count)
    total = sum(_widened(_array(source, count * len(calls), dtype)[own], dtype) for source, *_ in calls)
    _array(target, count, dtype)[:] = _narrowed(np.asarray(total), dtype)


def _deliver(place: int, calls: list[Any]) -> None:
    """Copy what other ranks send here, each in the order of its sends."""
    for other, sent in enumerate(calls):
        here = [(address, count) for kind, address, count, target in sent if kind == "send" and target == place]
        into = [
            (address, count) for kind, address, count, source in calls[place] if kind == "receive" and source == other
        ]
        for (source, size), (target, room) in zip(here, into, strict=True):
            assert size == room, "both sides agree about the size"
            _array(target, room)[:] = _array(source, size)


def joined(fake: FakeNccl, size: int, work: Callable[[NcclCommunicator], Any]) -> list[Any]:
    """Run `work` as each rank of a group, in threads, and return the results in the order of ranks."""
    nccl = Nccl(fake)
    identity, found = nccl.unique_id(), list[Any]([None] * size)
    kept: list[NcclCommunicator] = []  # until all have ended: the end of one breaks the calls of others

    def run(place: int) -> None:
        try:
            one = NcclCommunicator.over(nccl, identity, place, size, lambda device: 0)
            kept.append(one)
            found[place] = work(one)
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, RankError):
            raise one
    return found
