"""The processes of the other ranks of a mesh, started before this process imports torch.

A process needs seconds to import torch and to create the context of its GPU. Started early, it does so while rank 0
does the same. Later, rank 0 leaves its decisions in a file, such as the number of pages. Importing this imports no
torch.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ingot.ir.artifact.manifest_file import device_of, mesh_in
from ingot.ir.errors import OptionError, RankError
from ingot.ir.machine.gpus import GPU_VARIABLE, visible_gpus
from ingot.ir.machine.meeting import leave_file
from ingot.ir.mesh import ONE_DEVICE, Mesh, parse_mesh, world_size
from ingot.runtime.module_command import module_command
from ingot.runtime.ranks.child import LocalRank, RankChild
from ingot.runtime.ranks.host import Host, OtherHost, facts_here, hosts_json, this_host
from ingot.runtime.ranks.report_layout import report_bytes

# Processes whose pipes are closed get this long, before they are killed.
_END_SECONDS = 2.0
# Between two looks for a file that rank 0 leaves. Far below the time of any phase of loading.
_POLL_SECONDS = 0.005
# Files of the folder: one for the start of a process, and one for the decisions of rank 0.
_BEGIN, _LATER = "begin.json", "later.json"


# The folder inside, in which ranks meet.
MEETING = "meeting"


class _Watch(Protocol):
    """Watches the processes."""

    def stop(self) -> None:
        """Stop watching: the processes are about to end."""
        ...


@dataclass
class RankProcesses:
    """The processes of the other ranks, with the pipes of orders to those of this host, by the index of the rank.

    mesh        the mesh
    hosts       the hosts of the mesh: the one of rank 0, then the others
    folder      a folder that only this user can read
    area_fd     the descriptor of the shared memory of this host, which holds the reports of all ranks
    children    the processes, those of other hosts too
    others      the other hosts
    watch       watches the processes; None: nothing does yet
    release     gives back what was reserved for the processes, after their end
    """

    mesh: Mesh
    hosts: Sequence[Host]
    folder: Path
    area_fd: int
    children: dict[int, RankChild] = field(default_factory=dict)
    pipes: dict[int, int] = field(default_factory=dict)
    others: Sequence[OtherHost] = ()
    watch: _Watch | None = None
    release: Callable[[], None] = lambda: None

    @property
    def meeting(self) -> Path:
        """The folder in which ranks meet."""
        return self.folder / MEETING

    def end(self, seconds: float = _END_SECONDS) -> None:
        """End all processes: close their pipes, and kill those that still run after `seconds`."""
        if self.watch is not None:
            self.watch.stop()
        for other in self.others:
            other.close()
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):
                os.close(pipe)
        self.pipes.clear()
        self.close_area()
        deadline = time.monotonic() + seconds
        for child in self.children.values():
            if isinstance(child, LocalRank):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
                child.kill()  # no effect if it has ended
                child.wait()
        for other in self.others:
            other.wait_until_closed()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()
        self.release = lambda: None

    def close_area(self) -> None:
        """Close the descriptor of the shared memory here. The processes have it, and mapped memory stays."""
        if self.area_fd >= 0:
            os.close(self.area_fd)
            self.area_fd = -1

    def leave(self, decided: Mapping[str, Any]) -> None:
        """Leave what rank 0 has decided, for all processes. `decided` is what JSON can hold. Raises ConnectionError if
        another host is gone."""
        _write(self.folder / _LATER, decided)
        for other in self.others:
            other.leave(decided)


@contextlib.contextmanager
def begun_ranks(artifact: Path) -> Iterator[RankProcesses | None]:
    """Start the processes of the other ranks of an artifact, on this host. Load it in the `with` block: an error there
    ends them.

    The artifact is not checked yet, and they open no code of it. None: the artifact is for one device, its manifest
    cannot be read, or there are too few GPUs. Loading says so.

    Raises RankError if a process does not start.
    """
    mesh, device = unchecked_mesh(artifact), device_of(artifact)
    count = world_size(mesh)
    gpus = visible_gpus(count, os.environ.get(GPU_VARIABLE)) if device == "cuda" else []
    if count == 1 or device is None or len(gpus) not in (0, count):
        yield None
        return
    with ended_by_errors(start_processes(artifact, mesh, device, gpus)) as processes:
        yield processes


def unchecked_mesh(artifact: Path) -> Mesh:
    """Return the mesh in an artifact's manifest; that of one device if it cannot be read."""
    try:
        return parse_mesh(mesh_in(artifact))
    except OptionError:
        return ONE_DEVICE


@contextlib.contextmanager
def ended_by_errors(processes: RankProcesses) -> Iterator[RankProcesses]:
    """End processes if the `with` block raises an error."""
    try:
        yield processes
    except BaseException:
        processes.end(0)
        raise


def start_processes(
    artifact: Path,
    mesh: Mesh,
    device: str,
    gpus: Sequence[str],
    hosts: Sequence[Host] = (),
    index: int = 0,
) -> RankProcesses:
    """Start the processes of the ranks of this host, but not of rank 0.

    gpus    the name of the GPU of each rank of this host, as CUDA_VISIBLE_DEVICES takes it; empty for CPU ranks
    hosts   the hosts of the mesh; none: all ranks are here
    index   which of them this host is

    Raises RankError if a process does not start.
    """
    hosts = hosts or this_host(mesh)
    own, count = hosts[index].ranks, world_size(mesh)
    area = os.memfd_create("ingot-ranks")
    os.ftruncate(area, report_bytes(count))
    folder = Path(tempfile.mkdtemp(prefix="ingot-ranks-"))  # only this user can read it
    found = RankProcesses(mesh, hosts, folder, area)
    try:
        found.meeting.mkdir()
        begin = {"artifact": str(artifact.absolute()), "mesh": dict(mesh), "device": device}
        _write(folder / _BEGIN, {**begin, "hosts": hosts_json(hosts)})
        # A bound for threads that libraries start while they are imported. Rank 0 leaves the exact number.
        variables = {"OMP_NUM_THREADS": str(max(1, facts_here().cores // len(own)))}
        for place, rank in enumerate(own):
            if rank:
                _start(found, rank, {**variables, **({GPU_VARIABLE: gpus[place]} if gpus else {})})
    except OSError as error:
        found.end(0)
        raise RankError(f"a process of the mesh does not start: {error}") from error
    return found


def _start(processes: RankProcesses, rank: int, variables: Mapping[str, str]) -> None:
    read, write = os.pipe()
    processes.pipes[rank] = write
    module = module_command("ingot.runtime.ranks.worker")
    try:
        processes.children[rank] = LocalRank(
            [*module, str(processes.folder), str(rank), str(processes.area_fd), str(read)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(processes.area_fd, read),
            env={**os.environ, **variables},
            start_new_session=True,  # Ctrl-C reaches only rank 0
        )
    finally:
        os.close(read)


def read_begin(folder: Path) -> Mapping[str, Any]:
    """Return what a process knows when it starts: the artifact, the mesh, its hosts and the device."""
    found: Mapping[str, Any] = json.loads((folder / _BEGIN).read_bytes())
    return found


def read_later(folder: Path) -> Mapping[str, Any]:
    """Wait for what rank 0 decides, and return it. If rank 0 ends first, its pipe ends this process."""
    while not (folder / _LATER).exists():
        time.sleep(_POLL_SECONDS)
    found: Mapping[str, Any] = json.loads((folder / _LATER).read_bytes())
    return found


def _write(file: Path, content: Mapping[str, Any]) -> None:
    leave_file(file, json.dumps(content).encode())
