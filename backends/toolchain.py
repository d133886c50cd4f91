"""The C++ compiler of this machine, for the backends that need one."""

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from ingot.ir.errors import TargetError

# Headers of CUDA that AOTInductor's libraries include (torch/csrc/inductor/aoti_runtime/utils_cuda.h).
_CUDA_HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")
# It needs the C++ runtime, and no header of it, which would take a while to read.
_PROBE = 'namespace std { void terminate() noexcept; }\nextern "C" void ingot_probe() { std::terminate(); }\n'
# The runtimes of g++ and of clang++, as libraries that need them name them.
_SHARED_RUNTIMES = (b"libstdc++.so", b"libc++.so", b"libc++abi.so")


def compiler_path() -> str:
    """The C++ compiler: what CXX says, else g++ or clang++; TargetError when there is none."""
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise TargetError(
        "no C++ compiler was found",
        where=f"looked for {', '.join(wanted)}",
        expected="g++ or clang++ on the PATH, or CXX set to one",
        hint="install one, or compile with --backend reference; running an artifact needs none",
    )


def compiler_version() -> str:
    """The first line of what the compiler says of itself."""
    told = subprocess.run([compiler_path(), "--version"], capture_output=True, text=True, check=False).stdout
    return told.partition("\n")[0]


def check_links_libstdcxx() -> None:
    """Raise TargetError, with another compiler's name where there is one, when the compiler puts libstdc++ into every
    library that it links, as wrappers around compilers may. In a process that has torch's libstdc++ too, AOTInductor's
    libraries then crash in std::regex when they are loaded."""
    if not _links_statically(compiler_path()):
        return
    others = (shutil.which(name) for name in ("/usr/bin/g++", "/usr/bin/clang++", "g++", "clang++"))
    other = next((path for path in others if path is not None and not _links_statically(path)), None)
    raise TargetError(
        "the C++ compiler links libstdc++ statically, and compiled regions crash when they are loaded",
        where=compiler_path(),
        expected="a compiler that leaves libstdc++ a shared library",
        hint=f"set CXX={other}" if other else "set CXX to such a compiler, or compile with --backend reference",
    )


def cuda_headers() -> Path:
    """The folder of the CUDA toolkit's headers, by the rules of torch.utils.cpp_extension: CUDA_HOME or CUDA_PATH, else
    where nvcc lies, else /usr/local/cuda. Raises TargetError when AOTInductor would not find there what it includes."""
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    home = home or (str(Path(nvcc).parents[1]) if nvcc else "/usr/local/cuda")
    folder = Path(home) / "include"
    if missing := [name for name in _CUDA_HEADERS if not (folder / name).is_file()]:
        raise TargetError(
            f"the headers of the CUDA toolkit were not found: no {missing[0]}",
            where=str(folder),
            expected="a CUDA toolkit",
            hint="set CUDA_HOME to one",
        )
    return folder


@cache
def _links_statically(compiler: str) -> bool:
    """Of a library that it has linked, whether no shared runtime is among what it needs. A compiler that cannot link
    any is as good as others here: what is compiled with it ends with its own words."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=_PROBE.encode(), capture_output=True, check=False)
        if not library.is_file():
            return False
        code = library.read_bytes()
    return not any(name in code for name in _SHARED_RUNTIMES)
