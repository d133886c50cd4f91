"""The hosts of a mesh: which ranks run where. Importing this imports no torch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ingot.ir.machine.meeting import LOOPBACK
from ingot.ir.mesh import Mesh, world_size
from ingot.runtime.ranks.child import RankChild


@dataclass(frozen=True)
class Host:
    """A host of a mesh.

    address   the IPv4 address at which the other hosts reach it
    ranks     the indices of its ranks, which follow one another
    """

    address: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class HostFacts:
    """The facts of a host that rank 0 needs to decide for all ranks.

    cores    the cores on which the ranks of the host may compute
    memory   the bytes of its memory
    """

    cores: int
    memory: int


class OtherHost(Protocol):
    """Reaches the ranks of another host of the mesh. `HostLink` does."""

    @property
    def host(self) -> Host:
        """The host."""
        ...

    @property
    def facts(self) -> HostFacts:
        """Its facts, after it has joined."""
        ...

    @property
    def children(self) -> Mapping[int, RankChild]:
        """The processes of its ranks, by their index."""
        ...

    def order(self, order: bytes, place: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Give an order to its ranks, after writing words to the slot with the index `place`.

        `pieces` are the index of a first word, and words, as bytes. Raises ConnectionError if the host is gone.
        """
        ...

    def leave(self, decided: Mapping[str, Any]) -> None:
        """Leave what rank 0 has decided, for its ranks. Raises ConnectionError if the host is gone."""
        ...

    def wait_until_joined(self) -> None:
        """Wait until its processes have started. Raises IngotError if they cannot."""
        ...

    def close(self) -> None:
        """Let its processes end."""
        ...

    def wait_until_closed(self) -> None:
        """Wait until its processes have ended, a few seconds at most."""
        ...


def this_host(mesh: Mesh) -> tuple[Host, ...]:
    """Return the hosts of a mesh whose ranks are all on this host."""
    return (Host(LOOPBACK, tuple(range(world_size(mesh)))),)


def facts_here() -> HostFacts:
    """Return the facts of this host."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(text) if text.isdecimal() and int(text) else len(os.sched_getaffinity(0))
    return HostFacts(cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def hosts_json(hosts: Sequence[Host]) -> list[Any]:
    """Return hosts as what JSON can hold; `read_hosts` reads it."""
    return [[one.address, list(one.ranks)] for one in hosts]


def read_hosts(given: Sequence[Any]) -> tuple[Host, ...]:
    """Return the hosts that `hosts_json` has written."""
    return tuple(Host(address, tuple(ranks)) for address, ranks in given)
