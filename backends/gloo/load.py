"""The gloo backend at run time: connects CPU processes, and computes collectives over these connections.

torch's default process group stays free for other code of the process: the groups here are objects of their own.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from ingot.backends.collectives import along, sum_in_order, take_part, vocab_embedding
from ingot.backends.gloo.store import MeetingStore
from ingot.ir.errors import BackendError, RankError
from ingot.ir.machine.load_context import Communicator, LoadContext
from ingot.ir.machine.meeting import LOOPBACK, MeetingPlace
from ingot.ir.ops.collectives import in_parts

# Longer than any step takes: the ranks watch each other, and end a collective whose peer is gone long before.
_TIMEOUT = timedelta(hours=24)
# No value of a step has this tag (they have 0).
_ABORT_TAG = 1
# What may be on its way to other ranks before a sender waits: the few values of some steps, and no more memory than a
# step of 2048 tokens of a large model has in two values.
_MOST_SENT = 16
_MOST_SENT_BYTES = 128 << 20
_DIST: Any = torch.distributed  # whose stubs lack most of what it has


class GlooCommunicator(Communicator):
    """Connects the CPU processes of one mesh axis through gloo: on one host over the loopback address.

    meeting  where the processes exchange their ports
    name     identifies the group of processes there
    place    this rank's index on the axis
    size     the number of ranks on the axis

    The constructor waits for all processes of the group. Raises BackendError if they do not connect.
    """

    def __init__(self, meeting: MeetingPlace, name: str, place: int, size: int) -> None:
        self.place, self.size = place, size
        try:
            store = MeetingStore(meeting, name, _TIMEOUT.total_seconds())
            options = _DIST.ProcessGroupGloo._Options()
            address = LOOPBACK if meeting.one_host else meeting.address
            options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = _TIMEOUT
            self._group = _DIST.ProcessGroupGloo(store, place, size, options)
        except RuntimeError as error:
            raise BackendError(f"gloo does not connect {size} processes: {error}", where=name) from error
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # on its way, with the memory that gloo reads

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = list(torch.empty((self.size, *x.shape), dtype=x.dtype))
        with _peers():
            self._group.allgather([[_bytes(one) for one in found]], [_bytes(x.contiguous())]).wait()
        return found

    def exchange(self, parts: torch.Tensor) -> list[torch.Tensor]:
        found = torch.empty_like(parts)
        with _peers():
            self._group.alltoall_base(_bytes(found), _bytes(parts), [], []).wait()
        return list(found)

    def send(self, x: torch.Tensor, place: int) -> None:
        # gloo moves a value only once the other rank receives it, and that rank may still compute.
        copy = x.clone(memory_format=torch.contiguous_format)
        with _peers():
            self._sent.append((self._group.send([_bytes(copy)], place, 0), copy))
            while len(self._sent) > _MOST_SENT or sum(one.nbytes for _, one in self._sent) > _MOST_SENT_BYTES:
                self._sent.popleft()[0].wait()

    def abort(self) -> None:
        # Between hosts, a connection may break without an end that reaches this one. ProcessGroupGloo.abort of torch
        # 2.14 does nothing. A receive that is late ends all connections of its group, and so what waits for them.
        with contextlib.suppress(RuntimeError):
            other = (self.place + 1) % self.size
            self._group.recv([torch.zeros(1)], other, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def receive(self, into: torch.Tensor, place: int) -> None:
        with _peers():
            self._group.recv([_bytes(into)], place, 0).wait()


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Turn an error of a connection into RankError."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"the connection to another rank is broken: {error}") from error


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a row-major tensor as u8, which gloo moves whatever the dtype is."""
    return x.reshape(-1).view(torch.uint8)


def collectives(context: LoadContext) -> Mapping[str, Callable[..., Any]]:
    """Return the functions of the ops that ranks of a mesh axis compute together, by op name."""
    return {
        f"ingot.{name}": partial(function, context.communicators)
        for name, function in (
            ("all_reduce", _all_reduce),
            ("all_gather", _all_gather),
            ("reduce_scatter", _reduce_scatter),
            ("take_part", take_part),
            ("vocab_embedding", vocab_embedding),
        )
    }


Communicators = Mapping[str, Communicator]


def _all_reduce(communicators: Communicators, x: torch.Tensor, *, axis: str) -> torch.Tensor:
    return sum_in_order(along(communicators, axis).gather(x))


def _all_gather(
    communicators: Communicators,
    x: torch.Tensor,
    like: torch.Tensor | None = None,
    *,
    axis: str,
    dim: int,
    parts: int,
) -> torch.Tensor:
    found = torch.cat(along(communicators, axis).gather(x), dim)
    return found if like is None else found[: like.shape[0]]


def _reduce_scatter(communicators: Communicators, x: torch.Tensor, *, axis: str, dim: int, parts: int) -> torch.Tensor:
    return sum_in_order(along(communicators, axis).exchange(in_parts(x, parts, dim)))
