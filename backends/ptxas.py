"""Find the assembler of NVIDIA GPUs, ptxas, that makes machine code of Triton's kernels.

Triton comes with two, and takes the older one for compute capabilities below 10.0. In Triton 3.6 that is ptxas 12.8. It
can read a uniform register of a `wgmma` descriptor before the register is set: matmuls then read other memory. 12.9.86
and 13.0.88 make right code of the same PTX.
"""

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ingot.ir.errors import TargetError

_VARIABLE = "TRITON_PTXAS_PATH"  # Triton reads it at each compile, also in child processes
_LEAST = (12, 9)
_NAMES = ("ptxas", "ptxas-blackwell")  # in Triton's package; the second one is for compute capabilities from 10.0 on


@dataclass(frozen=True)
class Ptxas:
    path: str
    version: str

    @property
    def sound(self) -> bool:
        return tuple(map(int, self.version.split(".")[:2])) >= _LEAST


def use_ptxas() -> None:
    """Let Triton use a ptxas of version 12.9 or newer in this process and its children.

    Raises TargetError if there is none. The environment variable TRITON_PTXAS_PATH takes precedence over those of
    Triton's package.
    """
    os.environ[_VARIABLE] = _found(os.environ.get(_VARIABLE)).path


def ptxas_version() -> str:
    """Return the version of the ptxas that `use_ptxas` takes, such as "12.9.86", or "none" if there is none."""
    try:
        return _found(os.environ.get(_VARIABLE)).version
    except TargetError:
        return "none"


@cache
def _found(given: str | None) -> Ptxas:
    """Return the ptxas at the path `given`, or for None the first sound one of Triton's package.

    Raises TargetError if none is sound.
    """
    paths = [given] if given is not None else [str(_folder() / name) for name in _NAMES]
    there = [Ptxas(path, version) for path in paths if (version := _version(path))]
    for one in there:
        if one.sound:
            return one
    raise TargetError(
        "no ptxas was found that makes right machine code of matmuls",
        where=_VARIABLE if given is not None else "Triton's package",
        expected="ptxas 12.9 or newer; found " + (", ".join(f"{one.version} ({one.path})" for one in there) or "none"),
        hint=f"set {_VARIABLE} to the ptxas of CUDA 12.9 or newer, or install triton>=3.6",
    )


def _folder() -> Path:
    spec = importlib.util.find_spec("triton")  # importing it takes a second
    package = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    return package / "backends" / "nvidia" / "bin"


def _version(path: str) -> str:
    """Return the version that a ptxas prints, such as "12.9.86"; "" if it does not run."""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", output)
    return found[1] if found else ""
