"""What each engine process of a served model runs on: a GPU of its own, or a share of the cores."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.ir.errors import OptionError

_GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


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


def find_places(replicas: int, device: str) -> list[Place]:
    """Return a place for each of several replicas of a model that was compiled for `device`: "cuda" or "cpu".

    Raises OptionError if there are fewer GPUs, or cores, than replicas.
    """
    if device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return core_places(replicas, sorted(os.sched_getaffinity(0)), memory)
    return gpu_places(replicas, visible_gpus(_count_gpus(), os.environ.get(_GPU_VARIABLE)))


def gpu_places(replicas: int, gpus: Sequence[str]) -> list[Place]:
    """Return one GPU for each replica. Raises OptionError if there are too few."""
    _check(replicas, len(gpus), "GPUs", f"lower --replicas, or let {_GPU_VARIABLE} name more GPUs")
    return [Place(f"gpu {gpu}", {_GPU_VARIABLE: gpu}) for gpu in gpus[:replicas]]


def core_places(replicas: int, cores: Sequence[int], memory: int) -> list[Place]:
    """Return shares of the cores, of equal size but for one core, and of the bytes of memory. Raises OptionError if
    there are too few cores."""
    _check(replicas, len(cores), "cores", "lower --replicas")
    places = []
    for index in range(replicas):
        own = tuple(cores[index * len(cores) // replicas : (index + 1) * len(cores) // replicas])
        name = f"cores {own[0]}-{own[-1]}" if len(own) > 1 else f"core {own[0]}"
        # OpenMP would start a thread for each core of the machine if it were loaded before the process has its cores.
        places.append(Place(name, {"OMP_NUM_THREADS": str(len(own))}, own, memory // replicas))
    return places


def visible_gpus(count: int, variable: str | None) -> list[str]:
    """Return the names of the GPUs that this process can use, as CUDA_VISIBLE_DEVICES takes them.

    count      the number of them, from the driver
    variable   the value of CUDA_VISIBLE_DEVICES; None: it is not set
    """
    if variable is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in variable.split(",")][:count]  # the driver ignores all after a name that is wrong


def _check(replicas: int, count: int, what: str, hint: str) -> None:
    if count < replicas:
        raise OptionError(
            f"--replicas is {replicas}, and this process can use {count} {what}",
            expected=f"at most {count}" if count else "a machine with GPUs",
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
