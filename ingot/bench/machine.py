"""Describe the machine that runs a measurement, and the versions of its software."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ingot.ir.machine.target import Target

# Packages that affect measurements: they compile, launch or contain kernels.
PACKAGES = ("torch", "triton", "cuda-bindings", "flashinfer-python")
NOT_INSTALLED = "not installed"
_CPUINFO = Path("/proc/cpuinfo")


class Machine(BaseModel):
    """The machine that ran a measurement.

    `features` are the CPU's instruction sets that code may use. `cores` is the number of cores that the process may
    use. `memory` is in bytes. `load` is the load average of the last minute: other work on the machine raises it. `gpu`
    is the GPU's product name and `driver` its driver's version, as nvidia-smi prints them. Both are None without a GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    processor: str
    features: tuple[str, ...]
    cores: int
    memory: int
    system: str
    load: float
    gpu: str | None = None
    driver: str | None = None


def this_machine() -> Machine:
    target = Target.detect("cpu")
    gpu, driver = _gpu()
    text = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return Machine(
        processor=found[1] if found else platform.processor() or target.arch,
        features=target.features,
        cores=target.cores,
        memory=target.memory,
        system=f"{platform.system()} {platform.machine()}",
        load=round(os.getloadavg()[0], 2),
        gpu=gpu,
        driver=driver,
    )


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the packages, by name, or "not installed" for a missing package."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def _gpu() -> tuple[str | None, str | None]:
    """Return (name of the first GPU, version of its driver), or (None, None) without a GPU.

    They come from nvidia-smi, because CUDA would use GPU memory in this process.
    """
    if shutil.which("nvidia-smi") is None:
        return None, None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    first = done.stdout.partition("\n")[0]
    if done.returncode or "," not in first:
        return None, None  # nvidia-smi is installed, but there is no GPU
    name, driver = first.rsplit(",", 1)
    return name.strip(), driver.strip()
