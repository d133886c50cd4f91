"""The machine to compile for: this one, or a named target."""

import os
import platform
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from ingot.ir.errors import TargetError
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.gpus import NVLINK, TRIED, TYPICAL, Gpu, features_of


class Target(BaseModel):
    """The machine that code is compiled for.

    Compiled code depends on the fields from `name` to `versions`. Plans depend on the other fields too.

    name       "cpu", or a GPU's compute capability such as "sm_90"
    device     "cpu" or "cuda"
    arch       the architecture of the host's processor
    sm         a GPU's compute capability as an int (90 for Hopper); None on a CPU
    features   the instruction sets or hardware features that code may use
    versions   the versions of torch and, on a GPU, of CUDA and the driver, by name
    memory     bytes of memory
    cores      the number of a CPU's cores, or of a GPU's multiprocessors
    gpu        the GPU's product name; None on a CPU
    bandwidth  the GPU's memory bandwidth in bytes a second; None if unknown
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    name: str
    device: str
    arch: str
    sm: int | None
    features: tuple[str, ...]
    versions: dict[str, str]
    memory: int
    cores: int
    gpu: str | None = None
    bandwidth: int | None = None

    @staticmethod
    def detect(device: str = "auto") -> "Target":
        """Return the target of this machine: of its GPU ("cuda"), its CPU ("cpu"), or its GPU if it has one ("auto").

        Raises TargetError for "cuda" without a usable GPU, and for any other word.
        """
        match device:
            case "auto":
                try:
                    return _of_gpu(find_gpu())
                except TargetError:
                    return _detect_cpu()
            case "cuda":
                return _of_gpu(find_gpu())
            case "cpu":
                return _detect_cpu()
        raise _unknown(device)

    @staticmethod
    def named(name: str) -> "Target":
        """Return the target `name`: "auto", "cpu" or "cuda" for this machine, or a compute capability such as "sm_90".

        A capability means this machine's GPU if the GPU has it. Otherwise it means a typical device, so that a machine
        without a GPU can compile for one. Raises TargetError for an unknown name.
        """
        if not re.fullmatch(r"sm_\d{2,3}", name):
            return Target.detect(name)
        here = Target.detect("auto")
        if here.name == name:
            return here
        if name not in TYPICAL:
            raise _unknown(name)
        return _of_gpu(TYPICAL[name])

    @property
    def tried(self) -> bool:
        """Whether code for this target has ever run on such hardware: all of Ingot's tests, on a CPU or a GPU."""
        return self.sm is None or self.sm in TRIED

    def identity(self, linked: Collection[str] = ()) -> dict[str, Any]:
        """Return the properties that a machine must have to run code compiled for this target.

        `linked` names libraries that the code is linked with, as keys of `versions`. For a GPU, only the versions of
        these libraries are included. The driver's version is left out, because code runs with each driver that supports
        its CUDA version.
        """
        fields = self.model_dump(mode="json", include={"name", "device", "arch", "sm", "features", "versions"})
        if self.device == "cuda":
            fields["features"] = [name for name in fields["features"] if name != NVLINK]
            fields["versions"] = {name: version for name, version in self.versions.items() if name in linked}
        return fields

    def code_identity(self) -> dict[str, Any]:
        """Return the properties of this target that determine the compiled code, for keys of the compile cache.

        They are the properties of `identity` and, for a GPU, the number of multiprocessors. Kernels divide their work
        by this number, but run on GPUs with another number too.
        """
        return {**self.identity(), "cores": self.cores} if self.device == "cuda" else self.identity()

    def difference(self, other: "Target") -> str | None:
        """Return the first property that keeps code for this target from running on `other`; None if it runs there.

        The text has the values of both targets.
        """
        return first_difference(self.identity(), other.identity())

    def missing_here(self) -> str:
        """Return why this machine cannot run code compiled for this target; "" if it can."""
        try:
            here = Target.detect(self.device)
        except TargetError as error:
            return error.what
        difference = self.difference(here)
        return f"this machine is another target: {difference}" if difference else ""


# The keys of `Target.versions`. Other names in a manifest's versions are packages of backends.
VERSIONS = ("torch", "cuda", "driver")


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return the first property that differs between two machines, with both values, as text; None if all are equal.

    `mine` and `theirs` are results of `Target.identity`.
    """
    for key in [*theirs, *sorted(mine.keys() - theirs.keys())]:
        if key in mine and key in theirs and mine[key] == theirs[key]:
            continue
        if isinstance(mine.get(key), dict) and isinstance(theirs.get(key), dict):
            return f"{key}.{first_difference(mine[key], theirs[key])}"
        return f"{key}: {mine.get(key, 'missing')!s:.200} against {theirs.get(key, 'missing')!s:.200}"
    return None


def _unknown(name: str) -> TargetError:
    return TargetError(f"unknown target '{name:.80}'", expected=", ".join(("auto", "cpu", "cuda", *TYPICAL)))


def _detect_cpu() -> Target:
    capability = str(torch.backends.cpu.get_cpu_capability()).lower()
    # Inductor detects further instruction sets on the compiling machine, so they are part of the target.
    features = [capability] + [flag for flag in _CPU_FLAGS if flag in _cpu_flags()]
    return Target(
        name="cpu",
        device="cpu",
        arch=platform.machine(),
        sm=None,
        features=tuple(features),
        versions={"torch": torch.__version__},
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cores=len(os.sched_getaffinity(0)),
    )


# The flags that Inductor's CPU code generator tests besides the vector width (torch/_inductor/cpu_vec_isa.py).
_CPU_FLAGS = ("avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16")


def _cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass  # no procfs: the vector width alone describes the machine
    return frozenset()


def _of_gpu(gpu: Gpu) -> Target:
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": gpu.driver}
    return Target(
        name=gpu.target,
        device="cuda",
        arch=platform.machine(),
        sm=gpu.sm,
        features=(*features_of(gpu.sm), *([NVLINK] if gpu.links else [])),
        versions={name: str(version) for name, version in versions.items() if version},
        memory=gpu.memory,
        cores=gpu.cores,
        gpu=gpu.product,
        bandwidth=gpu.bandwidth,
    )
