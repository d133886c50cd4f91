"""The place of a process in a mesh: its rank, its memory, and its connections to the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.backends.table import BACKENDS
from ingot.ir.cache.scratch_pages import Scratch
from ingot.ir.machine.load_context import Communicator
from ingot.ir.machine.meeting import MeetingPlace
from ingot.ir.mesh import ONE_DEVICE, Mesh, Rank, groups, ranks
from ingot.runtime.loading.room import Room
from ingot.runtime.ranks.host import Host, this_host


@dataclass(frozen=True)
class Seat:
    """The place of this process in a mesh.

    rank     its rank
    mesh     the mesh
    room     the pages and slots that every rank allocates; None: this process decides, because it is the only one
    connect  waits for the other ranks, and returns the connections by mesh axis
    threads  the threads that this rank computes with; None: all that torch has
    """

    rank: Rank
    mesh: Mesh
    room: Room | None = None
    connect: Callable[[], Mapping[str, Communicator]] = dict
    threads: int | None = None


(_RANK,) = ranks(ONE_DEVICE)
# The seat of a process that serves alone.
ALONE = Seat(_RANK, ONE_DEVICE)


def connections(
    folder: Path, backend: str, mesh: Mesh, rank: Rank, hosts: Sequence[Host] = ()
) -> dict[str, Communicator]:
    """Connect this rank with the others, and return the connections by mesh axis. All ranks must call this.

    folder   the private folder in which the ranks meet
    backend  the backend that connects them
    hosts    the hosts of the mesh; none: all ranks are on this host
    """
    connect = BACKENDS[backend].connect
    assert connect is not None  # `collective_backend` returned the name
    hosts = hosts or this_host(mesh)
    own = next(host for host in hosts if rank.index in host.ranks)
    found = {}
    for axis, place, size in rank.axes:
        members = next(members for members in groups(mesh, axis) if rank.index in members)
        meeting = MeetingPlace(folder, own.address, one_host=set(members) <= set(own.ranks))
        found[axis] = connect(meeting, f"{axis}-{members[0]}", place, size)
    return found


def rank_text(rank: Rank) -> str:
    """Return the name of a rank in messages, such as "rank 1 (tp=1)"."""
    return f"rank {rank.index} ({' '.join(f'{axis}={place}' for axis, place, _ in rank.axes)})"


def room_json(room: Room) -> dict[str, Any]:
    """Return a room as a dict that JSON can hold; `read_room` reads it."""
    scratch = {name: vars(one) for name, one in room.scratch.items()}
    return {"pages": dict(room.pages), "scratch": scratch, "slots": room.slots}


def read_room(given: Mapping[str, Any]) -> Room:
    """Return the room that `room_json` has written."""
    scratch = {name: Scratch(**one) for name, one in given["scratch"].items()}
    return Room(given["pages"], scratch, given["slots"])
