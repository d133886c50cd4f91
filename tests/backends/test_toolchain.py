"""The C++ compiler of a machine and CUDA's headers: what is taken, and what is refused by name before it does harm."""

from pathlib import Path

import pytest
from wrapped_compiler import wrapper

from ingot.backends.inductor.emit import Inductor
from ingot.backends.toolchain import check_links_libstdcxx, compiler_path, cuda_headers
from ingot.ir.errors import TargetError
from ingot.ir.machine.target import Target
from ingot.ir.parse import parse_program

SMALL = parse_program("""program small stage=FUSED
dim T in [1, 4]
input x: f32[T, 8]
%mul = aten.mul.Tensor(%x, 3) : f32[T, 8]
return y=%mul
""")
CUDA_HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(TargetError, match=r"(?s)no C\+\+ compiler was found.*/nonexistent/g\+\+.*--backend reference"):
        Inductor().toolchain()
    with pytest.raises(TargetError, match=r"no C\+\+ compiler"):
        Inductor().emit(SMALL, "key", Target.detect("cpu"), tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match=r"looked for g\+\+, clang\+\+"):
        compiler_path()


def test_a_compiler_that_links_libstdcxx_statically_is_refused_and_another_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good, bad = wrapper(tmp_path / "good-c++", ""), wrapper(tmp_path / "bad-c++", "-static-libstdc++")
    monkeypatch.setenv("CXX", str(good))
    Inductor().toolchain()
    monkeypatch.setenv("CXX", str(bad))
    with pytest.raises(TargetError, match=r"links libstdc\+\+ statically") as caught:
        Inductor().toolchain()
    assert caught.value.where == str(bad)
    name, _, other = caught.value.hint.partition("=")
    assert name == "set CXX" and Path(other).is_file()
    monkeypatch.setenv("CXX", other)
    check_links_libstdcxx()


def test_headers_of_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(TargetError, match=r"no cuda\.h") as caught:
        cuda_headers()
    assert caught.value.where == str(tmp_path / "include") and caught.value.hint == "set CUDA_HOME to its folder"
    (tmp_path / "include").mkdir()
    for name in CUDA_HEADERS[:-1]:
        (tmp_path / "include" / name).touch()
    with pytest.raises(TargetError, match=r"no cuda_fp8\.h"):
        cuda_headers()
    (tmp_path / "include" / CUDA_HEADERS[-1]).touch()
    assert cuda_headers() == tmp_path / "include"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    (tmp_path / "bin").mkdir()
    wrapper(tmp_path / "bin" / "nvcc", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert cuda_headers() == tmp_path / "include", "where nvcc lies"
