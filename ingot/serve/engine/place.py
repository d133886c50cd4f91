"""What each engine process of a served model runs on: a GPU of its own, or a share of the cores."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.ir.errors import OptionError
from ingot.ir.machine.gpus import GPU_VARIABLE, visible_gpus


@dataclass(frozen=True)
class Place:
    """What an engine process runs on.

    name        names it for operators: "gpu 1", "cores 0-3"; empty for a process that may use all
    variables   variables of the process that differ from the server's
    cores       the cores that it may use; None: the server's
    memory      the bytes that it may use unless the options say so; None: what `LLM` takes by itself
    """

    name: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] | None = None
    memory: int | None = None

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the process that say its cores."""
        return [] if self.cores is None else [",".join(map(str, self.cores))]

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `LLM` in this place: those that were given, and a limit of memory without any."""
        limited = given.get("memory") is not None or given.get("num_kv_pages") is not None
        return given if self.memory is None or limited else {**given, "memory": self.memory}


ANYWHERE = Place()


def find_places(replicas: int, device: str, ranks: int = 1) -> list[Place]:
    """Return a place for each of several replicas of a model that was compiled for `device`: "cuda" or "cpu".

    Each replica has `ranks` ranks. On GPUs, each rank needs one. Raises OptionError if there are too few GPUs, or fewer
    cores than replicas.
    """
    if device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return core_places(replicas, sorted(os.sched_getaffinity(0)), memory)
    return gpu_places(replicas, visible_gpus(_count_gpus(), os.environ.get(GPU_VARIABLE)), ranks)


def gpu_places(replicas: int, gpus: Sequence[str], ranks: int = 1) -> list[Place]:
    """Return `ranks` GPUs for each replica. Raises OptionError if there are too few."""
    hint = f"lower --replicas, or let {GPU_VARIABLE} name more GPUs"
    _check(replicas, len(gpus) // ranks, len(gpus), f"GPUs with {ranks} for each" if ranks > 1 else "GPUs", hint)
    parts = [gpus[index * ranks : (index + 1) * ranks] for index in range(replicas)]
    return [Place(f"gpu {' '.join(part)}", {GPU_VARIABLE: ",".join(part)}) for part in parts]


def core_places(replicas: int, cores: Sequence[int], memory: int) -> list[Place]:
    """Return shares of the cores, of equal size but for one core, and of the bytes of memory. Raises OptionError if
    there are too few cores."""
    _check(replicas, len(cores), len(cores), "cores", "lower --replicas")
    places = []
    for index in range(replicas):
        own = tuple(cores[index * len(cores) // replicas : (index + 1) * len(cores) // replicas])
        name = f"cores {own[0]}-{own[-1]}" if len(own) > 1 else f"core {own[0]}"
        # OpenMP would start a thread for each core of the machine if it were loaded before the process has its cores.
        places.append(Place(name, {"OMP_NUM_THREADS": str(len(own))}, own, memory // replicas))
    return places


def _check(replicas: int, most: int, count: int, what: str, hint: str) -> None:
    if most < replicas:
        raise OptionError(
            f"--replicas is {replicas}, and this process can use {count} {what}",
            expected=f"at most {most}" if most else "a machine with more of them",
            hint=hint,
        )


def _count_gpus() -> int:
    """Return the number of GPUs that the driver shows to this process, without torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
