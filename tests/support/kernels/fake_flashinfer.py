"""A machine with FlashInfer and nvcc, as far as the backend looks: folders of headers, and a compiler that builds the
stand-in beside this file for the CPU."""

import os
from pathlib import Path

from installed import describe

_FOLDERS = (
    "include", "cutlass/include", "cutlass/tools/util/include", "cccl/cub", "cccl/libcudacxx/include", "cccl/thrust",
)  # fmt: skip
_NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0 ;;
--dryrun) echo "#$ TOP={toolkit}" >&2; exit 0 ;;
esac
echo "$@" > "{log}"
{build}
"""
_BUILD = """for one in "$@"; do case "$one" in -DINGOT_*) defines="$defines $one" ;; esac; done
exec g++ -O2 -shared -fPIC $defines -o attention.so "{source}"
"""


def install(folder: Path, *, build: str = "") -> None:
    """Put both into `folder`: `site` to import from, `toolkit` for CUDA_HOME. nvcc writes what it is called with into
    `nvcc.log`; `build` is what it runs in place of a compiler."""
    site, toolkit = folder / "site", folder / "toolkit"
    for part in _FOLDERS:
        (site / "flashinfer/data" / part).mkdir(parents=True)
    (site / "flashinfer/__init__.py").write_text("raise AssertionError('it is imported')\n")
    describe(site, "flashinfer-python", "0.6.13")
    for part in ("bin", "include"):
        (toolkit / part).mkdir(parents=True)
    (toolkit / "include/curand_kernel.h").touch()
    build = build or _BUILD.format(source=Path(__file__).with_name("fake_attention.cpp"))
    nvcc = toolkit / "bin/nvcc"
    nvcc.write_text(_NVCC.format(toolkit=toolkit, log=folder / "nvcc.log", build=build))
    os.chmod(nvcc, 0o755)
