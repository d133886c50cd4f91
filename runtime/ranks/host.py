"""The hosts of a mesh: which ranks run where. Importing this imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.ir.machine.meeting import LOOPBACK
from ingot.ir.mesh import Mesh, world_size


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
