"""Start the processes of a mesh on several hosts, before this process imports torch."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ingot.ir.artifact.manifest_file import device_of
from ingot.ir.errors import OptionError, RankError
from ingot.ir.machine.gpus import GPU_VARIABLE, visible_gpus
from ingot.ir.mesh import Mesh, world_size
from ingot.runtime.ranks.host import Host
from ingot.runtime.ranks.hosts.agent_order import make_order
from ingot.runtime.ranks.hosts.frames import TOKEN_BYTES
from ingot.runtime.ranks.hosts.link import HostLink
from ingot.runtime.ranks.hosts.listener import Listener
from ingot.runtime.ranks.processes import RankProcesses, ended_by_errors, start_processes, unchecked_mesh
from ingot.runtime.ranks.reports import Reports


class Placement(Protocol):
    """The hosts of a mesh, on which room is reserved for its ranks."""

    @property
    def hosts(self) -> Sequence[Host]:
        """The host of this process, which has rank 0, then the others."""
        ...

    def start(self, index: int, order: Mapping[str, Any]) -> Callable[[], str | None]:
        """Start the agent of `hosts[index]` with an order, and return a function. It returns why the agent has ended;
        None while it runs."""
        ...

    def release(self) -> None:
        """Give back what is reserved."""
        ...


# Reserves room for the ranks of a mesh, on a device ("cpu" or "cuda"). Raises IngotError if there is too little.
PlaceRanks = Callable[[Mesh, str], Placement]


@contextlib.contextmanager
def begun_on_hosts(artifact: Path, place: PlaceRanks) -> Iterator[RankProcesses | None]:
    """Start the processes of the other ranks of an artifact, on the hosts that `place` finds. Load it in the `with`
    block: an error there ends them.

    None: the manifest cannot be read. Loading says so. Raises OptionError for an artifact for one device.
    """
    device, mesh = device_of(artifact), unchecked_mesh(artifact)
    if device is None:
        yield None
        return
    if world_size(mesh) == 1:
        raise OptionError(
            "the ranks of an artifact for one process on several hosts",
            where=str(artifact),
            expected="an artifact for a mesh",
            hint='compile the model with --mesh "tp=2", or leave the option of hosts out',
        )
    placement = place(mesh, device)
    with ended_by_errors(start_on_hosts(artifact, mesh, device, placement)) as processes:
        yield processes


def start_on_hosts(artifact: Path, mesh: Mesh, device: str, placement: Placement) -> RankProcesses:
    """Start the processes of all ranks but rank 0: those of this host, and an agent on each other host. Raises
    IngotError if one does not start; then nothing is left."""
    with contextlib.ExitStack() as undone:
        undone.callback(placement.release)
        hosts, token = placement.hosts, secrets.token_bytes(TOKEN_BYTES)
        try:
            listener = Listener(hosts[0].address, token)
        except OSError as error:
            raise RankError(
                f"rank 0 cannot listen at the address of its host, {hosts[0].address}: {error.strerror}",
                expected="an address of this host that the other hosts reach",
            ) from error
        undone.callback(listener.close)
        orders = [make_order(hosts, index, listener.port, token, artifact, mesh, device) for index in range(len(hosts))]
        count = len(hosts[0].ranks)
        gpus = visible_gpus(count, os.environ.get(GPU_VARIABLE)) if device == "cuda" else []
        failures = {index: placement.start(index, orders[index].json()) for index in range(1, len(hosts))}
        processes = start_processes(artifact, mesh, device, gpus, hosts)
        reports = Reports(world_size(mesh), processes.area_fd)
        links = [HostLink(hosts[index], reports, processes.meeting, failed) for index, failed in failures.items()]
        processes.others = links
        processes.children.update({rank: child for link in links for rank, child in link.children.items()})
        processes.release = partial(_release, listener, placement)
        listener.accept({index: link.connect for index, link in zip(failures, links, strict=True)})
        undone.pop_all()
    return processes


def _release(listener: Listener, placement: Placement) -> None:
    listener.close()
    placement.release()
