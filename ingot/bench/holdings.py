"""What a process holds: memory, files, objects of the runtime, and what the requests of its engine take up."""

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.runtime.engine import Engine
from ingot.runtime.occupancy import Occupancy

_RUNTIME = "ingot.runtime."
_GRAPHS = "ingot.runtime.cuda."  # captured steps are no request's


@dataclass(frozen=True)
class Holdings:
    """At a moment at which nothing is served.

    anonymous   bytes of memory that is no file's
    device      bytes of the GPU's memory that are taken, by whomever; None without one
    fds         open file descriptors
    objects     of the runtime's classes: requests, outputs and all that belongs to them
    """

    anonymous: int
    device: int | None
    fds: int
    objects: int
    occupancy: Occupancy


def take_holdings(engine: Engine) -> Holdings:
    """What is held once all that nobody refers to is given back, to the system too."""
    gc.collect()
    _trim()
    return Holdings(anonymous_memory(), _device_memory(), _open_files(), _runtime_objects(), engine.occupancy)


def anonymous_memory() -> int:
    """Bytes of resident memory of this process that no file backs; weights are mapped from files, and not in it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def _trim() -> None:
    """Let malloc give back what is free, where it is glibc's: else it keeps what the largest step left."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _device_memory() -> int | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _runtime_objects() -> int:
    kinds = (type(one) for one in gc.get_objects())
    modules = (str(kind.__module__) for kind in kinds if kind is not Occupancy)  # which earlier holdings have
    return sum(1 for name in modules if name.startswith(_RUNTIME) and not name.startswith(_GRAPHS))
