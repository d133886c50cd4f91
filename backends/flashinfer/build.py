"""Build FlashInfer's attention kernels for one call into a shared object, on any machine with nvcc."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from ingot.backends.flashinfer.packages import Packages
from ingot.ir.errors import BackendError

KERNELS = Path(__file__).with_name("kernels")
LIBRARY = "attention.so"
# The flags of FlashInfer's own build (flashinfer/jit/core.py and cpp_ext.py). nvcc links the CUDA runtime statically by
# default, so the shared object needs only the driver.
_FLAGS = (
    "-shared",
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-use_fast_math",
    "--expt-relaxed-constexpr",
    "-static-global-template-stub=false",
    "-Xfatbin=-compress-all",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xlinker=-s",
    "-DFLASHINFER_ENABLE_F16",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DFLASHINFER_ENABLE_FP8_E5M2",
    "-DFLASHINFER_ENABLE_FP8_E8M0",
    "-DFLASHINFER_ENABLE_FP4_E2M1",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
)


def build(kernel: str, constants: Mapping[str, object], sm: int, packages: Packages, directory: Path) -> None:
    """Build the attention library of one call with nvcc. `directory` receives it as the file LIBRARY.

    `kernel` is "fa2" or "fa3". `constants` maps names of C++ macros to values, such as head counts and strides. `sm` is
    the compute capability, 90 for Hopper. `packages` are the headers and compilers. Raises BackendError with nvcc's
    errors.
    """
    # Hopper's own instructions, such as wgmma, exist only in code for "90a".
    arch = "90a" if sm == 90 else str(sm)
    command = [
        str(packages.nvcc),
        *_FLAGS,
        f"-ccbin={packages.cxx}",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        *(f"-I{folder}" for folder in packages.headers),
        *(f"-Xcompiler=-idirafter,{folder}" for folder in packages.fallback),
        *(f"-D{name}={value}" for name, value in constants.items()),
        "-o",
        LIBRARY,
        *(str(KERNELS / f"{name}.cu") for name in ("entry", kernel)),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
    if built.returncode:
        errors = [line for line in (built.stderr + built.stdout).splitlines() if "error" in line]
        raise BackendError(
            f"nvcc cannot build FlashInfer's {kernel}: {' / '.join(errors[:3]) or built.stderr[-500:]}"[:1500],
            where=", ".join(f"{name} {version}" for name, version in packages.versions.items()),
            hint="compile with --backend triton, and report this",
        )
