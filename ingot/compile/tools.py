"""Look up the compilers and packages of this machine that compiling may need."""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable, Mapping

from ingot.backends.ptxas import ptxas_version
from ingot.backends.toolchain import check_links_libstdcxx, compiler_path, compiler_version
from ingot.ir.errors import TargetError

_EXTRA = "pip install 'ingot[cuda]'"


def tools_found() -> dict[str, str]:
    """Return a text for each compiler or package that compiling may use, by its name.

    The text has the version and the path. For a missing tool, it says what does not work.
    """
    return {name: look() for name, look in _TOOLS.items()}


def _cxx() -> str:
    try:
        path, version = compiler_path(), compiler_version()
    except TargetError:
        return "none: for CPUs compile with --backend reference"
    try:
        check_links_libstdcxx()
    except TargetError as error:
        return f"{version} ({path}); {error.what}: {error.hint}"
    return f"{version} ({path})"


def _nvcc() -> str:
    path = shutil.which("nvcc")
    if path is None:
        return "none: FlashInfer's kernels cannot be built, and Ingot's replace them"
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{next((line for line in output.splitlines() if 'release' in line), '')} ({path})"


def _ptxas() -> str:
    found = ptxas_version()
    return found if found != "none" else "none of version 12.9 or newer: kernels for a GPU cannot be compiled"


def _package(name: str, without: str, install: str = _EXTRA) -> Callable[[], str]:
    def look() -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"none: {without} ({install})"

    return look


_TOOLS: Mapping[str, Callable[[], str]] = {
    "c++": _cxx,
    "nvcc": _nvcc,
    "triton": _package("triton", "compiling for a GPU needs it"),
    "ptxas": _ptxas,
    "flashinfer-python": _package(
        "flashinfer-python", "Ingot's kernels compute prefill attention", "pip install 'ingot[flashinfer]'"
    ),
    "cuda-bindings": _package("cuda-bindings", "running on a GPU needs it"),
}
