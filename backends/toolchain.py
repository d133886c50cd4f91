"""Find and check the C++ compiler and the CUDA headers of this machine, for backends that compile C++."""

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from ingot.ir.errors import TargetError

# Headers of CUDA that AOTInductor's libraries include (torch/csrc/inductor/aoti_runtime/utils_cuda.h).
_CUDA_HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")
# A source that needs the C++ runtime. It includes no header, which would take long to read.
_PROBE = 'namespace std { void terminate() noexcept; }\nextern "C" void ingot_probe() { std::terminate(); }\n'
# The names of the runtimes of g++ and clang++ in libraries that link with them.
_SHARED_RUNTIMES = (b"libstdc++.so", b"libc++.so", b"libc++abi.so")


def compiler_path() -> str:
    """Return the path of the C++ compiler: $CXX, else g++ or clang++. Raises TargetError if there is none."""
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise TargetError(
        "no C++ compiler was found",
        where=f"looked for {', '.join(wanted)}",
        expected="g++ or clang++ on the PATH, or CXX set to one",
        hint="install a C++ compiler, or compile with --backend reference; running an artifact needs none",
    )


def compiler_version() -> str:
    """Return the first line that the C++ compiler prints for --version."""
    output = subprocess.run([compiler_path(), "--version"], capture_output=True, text=True, check=False).stdout
    return output.partition("\n")[0]


def check_links_libstdcxx() -> None:
    """Raise TargetError if the C++ compiler links libstdc++ statically.

    Some compiler wrappers do so. A library of AOTInductor would then crash when torch's process loads it. The error
    suggests another compiler if one is found.
    """
    if not _links_statically(compiler_path()):
        return
    others = (shutil.which(name) for name in ("/usr/bin/g++", "/usr/bin/clang++", "g++", "clang++"))
    other = next((path for path in others if path is not None and not _links_statically(path)), None)
    raise TargetError(
        "the C++ compiler links libstdc++ statically, and compiled regions crash when they are loaded",
        where=compiler_path(),
        expected="a compiler that links libstdc++ as a shared library",
        hint=f"set CXX={other}" if other else "set CXX to such a compiler, or compile with --backend reference",
    )


def cuda_headers() -> Path:
    """Return the folder of the CUDA toolkit's headers, as torch.utils.cpp_extension finds it.

    The toolkit is CUDA_HOME or CUDA_PATH. If neither is set, it is the toolkit of the nvcc on the PATH, else
    /usr/local/cuda. Raises TargetError if the folder lacks a header that AOTInductor includes.
    """
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    home = home or (str(Path(nvcc).parents[1]) if nvcc else "/usr/local/cuda")
    folder = Path(home) / "include"
    if missing := [name for name in _CUDA_HEADERS if not (folder / name).is_file()]:
        raise TargetError(
            f"the headers of the CUDA toolkit were not found: no {missing[0]}",
            where=str(folder),
            expected="a CUDA toolkit",
            hint="set CUDA_HOME to its folder",
        )
    return folder


@cache
def _links_statically(compiler: str) -> bool:
    """Return whether the compiler at this path links the C++ runtime statically. It links a small library to test this.

    Return False if that link fails, because a later compile then reports the compiler's own error.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=_PROBE.encode(), capture_output=True, check=False)
        if not library.is_file():
            return False
        code = library.read_bytes()
    return not any(name in code for name in _SHARED_RUNTIMES)
