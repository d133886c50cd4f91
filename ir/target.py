"""The machine that is compiled for: found on this one, or named."""

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from ingot.ir.errors import TargetError


class Target(BaseModel):
    """What compiled code depends on (`identity`), and what only informs the plan (memory, cores).

    `sm` is a CUDA compute capability as an int (90 for Hopper), None on a CPU. `memory` is in bytes.
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

    @staticmethod
    def detect(device: str = "auto") -> "Target":
        """This machine: its GPU when it has one and `device` is "auto" or "cuda", else its CPU."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            return _detect_cuda()
        if device == "cpu":
            return _detect_cpu()
        raise TargetError(f"unknown target '{device}'", expected="auto, cpu or cuda")

    def identity(self) -> dict[str, Any]:
        """The fields that compiled code depends on."""
        return self.model_dump(mode="json", exclude={"memory", "cores"})

    def difference(self, other: "Target") -> str | None:
        """The first field of the identity that differs, with both values; None when code for one fits the other."""
        return first_difference(self.identity(), other.identity())


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first field that differs between two identities, with both values; None when they are equal."""
    for key in [*theirs, *sorted(mine.keys() - theirs.keys())]:
        if key in mine and key in theirs and mine[key] == theirs[key]:
            continue
        if isinstance(mine.get(key), dict) and isinstance(theirs.get(key), dict):
            return f"{key}.{first_difference(mine[key], theirs[key])}"
        return f"{key}: {mine.get(key, 'missing')!s:.200} against {theirs.get(key, 'missing')!s:.200}"
    return None


def _detect_cpu() -> Target:
    capability = str(torch.backends.cpu.get_cpu_capability()).lower()
    # Inductor reads further instruction sets off the machine that it compiles on, so they are part of the target.
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


# What Inductor's CPU code generator asks for beyond the vector width (torch/_inductor/cpu_vec_isa.py).
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


def _detect_cuda() -> Target:
    if not torch.cuda.is_available():
        raise TargetError("this machine has no CUDA GPU that torch can use", expected="a GPU, or target 'cpu'")
    properties = torch.cuda.get_device_properties(0)
    sm = properties.major * 10 + properties.minor
    # First compute capability with each feature: CUDA C++ programming guide, appendix "Compute Capabilities".
    features = {"bf16": 80, "fp8": 89, "tma": 90, "wgmma": 90, "dependent_launch": 90, "fp4": 100}
    return Target(
        name=properties.name,
        device="cuda",
        arch=platform.machine(),
        sm=sm,
        features=tuple(name for name, first in features.items() if sm >= first),
        versions={"torch": torch.__version__, "cuda": str(torch.version.cuda)},
        memory=properties.total_memory,
        cores=properties.multi_processor_count,
    )
