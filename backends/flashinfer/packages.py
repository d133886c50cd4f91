"""Find the packages to build FlashInfer's kernels with: its headers, nvcc, and a C++ compiler."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ingot.backends.toolchain import compiler_path, compiler_version
from ingot.ir.errors import TargetError

_PACKAGE = "flashinfer-python"


@dataclass(frozen=True)
class Missing:
    """The result of `find_packages` if FlashInfer's kernels cannot be built here. `reason` says why."""

    reason: str


@dataclass(frozen=True)
class Packages:
    """The compilers and headers that build FlashInfer's kernels.

    `nvcc` and `cxx` are the paths of the CUDA and the C++ compiler. `versions` maps "flashinfer", "nvcc" and "c++" to
    versions. `headers` are FlashInfer's include folders. `fallback` are include folders to search last (cuRAND).
    """

    nvcc: Path
    cxx: Path
    versions: Mapping[str, str]
    headers: tuple[Path, ...]
    fallback: tuple[Path, ...]


@functools.cache
def find_packages() -> Packages | Missing:
    """Find the compilers and headers that build FlashInfer's kernels. This imports no package.

    Returns Missing if one of them is absent.
    """
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return Missing("FlashInfer is not installed (pip install 'ingot[flashinfer]')")
    data = Path(spec.origin).parent / "data"
    # The folders of FlashInfer's own build (flashinfer/jit/cpp_ext.py); its copies come before those of the toolkit.
    headers = tuple(
        data / part
        for part in (
            "include", "cutlass/include", "cutlass/tools/util/include",
            "cccl/cub", "cccl/libcudacxx/include", "cccl/thrust",
        )
    )  # fmt: skip
    if absent := [folder for folder in headers if not folder.is_dir()]:
        return Missing(f"this FlashInfer has no data folder {absent[0].relative_to(data)}")
    try:
        versions = {"flashinfer": version(_PACKAGE)}
    except PackageNotFoundError:
        return Missing(f"the FlashInfer at {data.parent} has no package metadata, so its version is unknown")
    nvcc = _nvcc()
    if nvcc is None:
        return Missing("nvcc was not found: looked on the PATH and in CUDA_HOME")
    try:
        cxx = Path(compiler_path())
    except TargetError as error:
        return Missing(error.what)
    fallback = tuple(_folders_with("curand_kernel.h"))
    if not fallback and not (_toolkit(nvcc) / "include" / "curand_kernel.h").is_file():
        return Missing("the headers of cuRAND were not found (pip install 'ingot[flashinfer]')")
    versions |= {"nvcc": _nvcc_version(nvcc), "c++": compiler_version()}
    return Packages(nvcc, cxx, versions, headers, fallback)


def _nvcc() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    return Path(found) if found else None


def _nvcc_version(nvcc: Path) -> str:
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bV(\d[\d.]*)", output)
    return found[1] if found else output.strip()[-80:]


def _toolkit(nvcc: Path) -> Path:
    """Return the folder of the CUDA toolkit of `nvcc`, as `nvcc --dryrun` prints it.

    The path of nvcc itself does not suffice, because it may be a wrapper script.
    """
    output = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return Path(found[1].strip()) if found else nvcc.parents[1]


def _folders_with(header: str) -> Iterator[Path]:
    """Yield the include folders of NVIDIA's Python packages that contain the file `header`."""
    spec = find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        yield from (path.parent for path in sorted(Path(root).glob(f"*/include/{header}")))
