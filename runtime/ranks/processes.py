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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ingot.ir.artifact.manifest_file import device_of, mesh_in
from ingot.ir.errors import OptionError, RankError
from ingot.ir.machine.gpus import GPU_VARIABLE, visible_gpus
from ingot.ir.mesh import ONE_DEVICE, Mesh, parse_mesh, ranks, world_size
from ingot.runtime.module_command import module_command
from ingot.runtime.ranks.report_layout import report_bytes

# Processes whose pipes are closed get this long, before they are killed.
_END_SECONDS = 2.0
# Between two looks for a file that rank 0 leaves. Far below the time of any phase of loading.
_POLL_SECONDS = 0.005
# Files of the folder: one for the start of a process, and one for the decisions of rank 0.
_BEGIN, _LATER = "begin.json", "later.json"


class _Watch(Protocol):
    """Watches the processes."""

    def stop(self) -> None:
        """Stop watching: the processes are about to end."""
        ...


@dataclass
class RankProcesses:
    """The processes of the other ranks, with the pipes of orders to them, by the index of the rank.

    mesh      the mesh
    folder    a folder that only this user can read, in which the ranks meet
    area_fd   the descriptor of the shared memory, which holds the reports of the ranks
    watch     watches the processes; None: nothing does yet
    """

    mesh: Mesh
    folder: Path
    area_fd: int
    children: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    pipes: dict[int, int] = field(default_factory=dict)
    watch: _Watch | None = None

    def end(self, seconds: float = _END_SECONDS) -> None:
        """End all processes: close their pipes, and kill those that still run after `seconds`."""
        if self.watch is not None:
            self.watch.stop()
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):
                os.close(pipe)
        self.pipes.clear()
        self.close_area()
        deadline = time.monotonic() + seconds
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()  # no effect if it has ended
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close_area(self) -> None:
        """Close the descriptor of the shared memory here. The processes have it, and mapped memory stays."""
        if self.area_fd >= 0:
            os.close(self.area_fd)
            self.area_fd = -1

    def leave(self, decided: Mapping[str, Any]) -> None:
        """Leave what rank 0 has decided, for all processes. `decided` is what JSON can hold."""
        _write(self.folder / _LATER, decided)


@contextlib.contextmanager
def begun_ranks(artifact: Path) -> Iterator[RankProcesses | None]:
    """Start the processes of the other ranks of an artifact. Load it in the `with` block: an error there ends them.

    The artifact is not checked yet, and they open no code of it. None: the artifact is for one device, its manifest
    cannot be read, or there are too few GPUs. Loading says so.

    Raises RankError if a process does not start.
    """
    mesh: Mesh
    try:
        mesh = parse_mesh(mesh_in(artifact))
    except OptionError:
        mesh = ONE_DEVICE
    device, count = device_of(artifact), world_size(mesh)
    gpus = visible_gpus(count, os.environ.get(GPU_VARIABLE)) if device == "cuda" else []
    if count == 1 or device is None or len(gpus) not in (0, count):
        yield None
        return
    processes = start_processes(artifact, mesh, device, gpus)
    try:
        yield processes
    except BaseException:
        processes.end(0)
        raise


def start_processes(artifact: Path, mesh: Mesh, device: str, gpus: list[str]) -> RankProcesses:
    """Start the processes of the other ranks. `gpus` has the name of each rank's GPU, as CUDA_VISIBLE_DEVICES takes it;
    it is empty for CPU ranks. Raises RankError if a process does not start."""
    count = world_size(mesh)
    area = os.memfd_create("ingot-ranks")
    os.ftruncate(area, report_bytes(count))
    found = RankProcesses(mesh, Path(tempfile.mkdtemp(prefix="ingot-ranks-")), area)  # only this user can read it
    try:
        _write(found.folder / _BEGIN, {"artifact": str(artifact.absolute()), "mesh": dict(mesh), "device": device})
        cores = int(text) if (text := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() else _cores()
        # A bound for threads that libraries start while they are imported. Rank 0 leaves the exact number.
        variables = {"OMP_NUM_THREADS": str(max(1, cores // count))}
        for rank in ranks(mesh)[1:]:
            _start(found, rank.index, {**variables, **({GPU_VARIABLE: gpus[rank.index]} if gpus else {})})
    except OSError as error:
        found.end(0)
        raise RankError(f"a process of the mesh does not start: {error}") from error
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _start(processes: RankProcesses, rank: int, variables: Mapping[str, str]) -> None:
    read, write = os.pipe()
    processes.pipes[rank] = write
    module = module_command("ingot.runtime.ranks.worker")
    try:
        processes.children[rank] = subprocess.Popen(
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
    """Return what a process knows when it starts: the artifact, the mesh and the device."""
    found: Mapping[str, Any] = json.loads((folder / _BEGIN).read_bytes())
    return found


def read_later(folder: Path) -> Mapping[str, Any]:
    """Wait for what rank 0 decides, and return it. If rank 0 ends first, its pipe ends this process."""
    while not (folder / _LATER).exists():
        time.sleep(_POLL_SECONDS)
    found: Mapping[str, Any] = json.loads((folder / _LATER).read_bytes())
    return found


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file all at once."""
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(content))
    beside.rename(file)
