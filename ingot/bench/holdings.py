"""Count the resources that a process holds: memory, files, Python objects, and what its engine keeps for requests."""

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.runtime.engines.engine import Engine
from ingot.runtime.scheduling.occupancy import Occupancy

_RUNTIME = "ingot.runtime."
_GRAPHS = "ingot.runtime.cuda."  # captured steps belong to no request


@dataclass(frozen=True)
class Holdings:
    """The resources that a process holds while no request runs. Growth between two such moments is a leak.

    - `anonymous`: bytes of memory that no file backs
    - `device`: used bytes of the GPU's memory, by any process; None without a GPU
    - `fds`: number of open file descriptors
    - `objects`: number of instances of the runtime's classes, such as requests and outputs
    - `occupancy`: numbers of requests, steps, KV pages and device rows (rows of per-sequence tensors) in the engine
    """

    anonymous: int
    device: int | None
    fds: int
    objects: int
    occupancy: Occupancy


def take_holdings(engine: Engine) -> Holdings:
    """Collect garbage, return free memory to the system, and return the resources that this process then holds."""
    gc.collect()
    _trim()
    return Holdings(anonymous_memory(), _device_memory(), _open_files(), _runtime_objects(), engine.occupancy)


def anonymous_memory() -> int:
    """Return the resident bytes of this process that no file backs. Weights do not count: files back them."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def _trim() -> None:
    """Make glibc's malloc return free memory to the system. By itself, it keeps the memory of the largest step.

    Does nothing with another malloc.
    """
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
    modules = (str(kind.__module__) for kind in kinds if kind is not Occupancy)  # earlier holdings contain these
    return sum(1 for name in modules if name.startswith(_RUNTIME) and not name.startswith(_GRAPHS))
