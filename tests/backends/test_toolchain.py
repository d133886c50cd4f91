"""The compilers of a machine: which is taken, and which are refused by name before they do harm."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from staged import BUCKET, staged, traced
from tiny import TINY

import ingot.backends.inductor.emit_cuda as emit_cuda
import ingot.ir.target
from ingot.backends.inductor.emit import Inductor
from ingot.backends.inductor.emit_cuda import InductorCuda, missing_here
from ingot.backends.toolchain import check_links_libstdcxx, compiler_path, cuda_headers
from ingot.ir.backend import No, Yes
from ingot.ir.errors import TargetError
from ingot.ir.gpus import TYPICAL
from ingot.ir.parse import parse_program
from ingot.ir.target import Target
from ingot.providers import BACKEND_CHOICES, backends_named, competing

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


def wrapper(path: Path, option: str) -> Path:
    """A compiler that puts an option in front of those that it is given."""
    path.write_text(f'#!/bin/sh\nexec {compiler_path()} {option} "$@"\n')
    path.chmod(0o755)
    return path


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
    assert caught.value.where == str(tmp_path / "include") and caught.value.hint == "set CUDA_HOME to one"
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


# What a machine lacks to compile regions for its GPU is what inductor refuses with there.


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has a GPU, and all that compiling for it needs."""
    monkeypatch.setattr(ingot.ir.target, "find_gpu", lambda: TYPICAL["sm_90"])
    (tmp_path / "include").mkdir()
    for name in CUDA_HEADERS:
        (tmp_path / "include" / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return tmp_path


def _no_gpu() -> None:
    raise TargetError("it has none")


def _static(monkeypatch: pytest.MonkeyPatch, toolkit: Path) -> None:
    monkeypatch.setenv("CXX", str(wrapper(toolkit / "bad-c++", "-static-libstdc++")))


@pytest.mark.parametrize(
    ("lack", "reason"),
    [
        (lambda patch, toolkit: None, ""),
        (
            lambda patch, toolkit: patch.setattr(ingot.ir.target, "find_gpu", _no_gpu),
            ".*a GPU like the one.*it has none",
        ),
        (lambda patch, toolkit: patch.setattr(ingot.ir.target, "find_gpu", lambda: TYPICAL["sm_80"]), ".*: sm_80"),
        (
            lambda patch, toolkit: patch.setattr(emit_cuda.importlib.util, "find_spec", lambda name: None),
            ".* needs Triton",
        ),
        (lambda patch, toolkit: patch.setenv("CXX", "/nonexistent"), r"no C\+\+ compiler was found"),
        (_static, r".*links libstdc\+\+ statically.*bad-c\+\+.*set CXX="),
        (lambda patch, toolkit: (toolkit / "include" / "cuda.h").unlink(), ".*no cuda.h .*: set CUDA_HOME"),
    ],
    ids=["nothing", "GPU", "this GPU", "Triton", "compiler", "libstdc++", "headers"],
)
def test_what_compiling_for_a_gpu_lacks(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch, lack: Callable[..., object], reason: str
) -> None:
    lack(monkeypatch, toolkit)
    found = missing_here("sm_90")
    assert re.match(reason or "$", found), found
    nodes = list(SMALL.calls())
    answer = InductorCuda().claim(nodes, Target.named("sm_90"), BUCKET)
    assert answer == No(found) if found else isinstance(answer, Yes)


def test_the_order_of_providers_on_a_gpu(toolkit: Path) -> None:
    """Where others have kernels inductor is behind them, and in front of the reference; by name in front of all."""
    target = Target.named("sm_90")
    _, lowered = staged(traced(TINY["qwen3-biased"].config))
    for choice in ("auto", "inductor"):
        for node in lowered.fused.calls():
            claims = {one.name: one.claim([node], target, BUCKET) for one in competing(choice, target)}
            inductor = claims["inductor"]
            if isinstance(inductor, No):
                assert inductor.reason.endswith("stands outside regions")
                continue
            assert isinstance(inductor, Yes) and not inductor.batch_invariant
            others = {name: one.cost for name, one in claims.items() if isinstance(one, Yes) and name != "inductor"}
            assert inductor.cost < others.pop("reference") and inductor.cost < others.pop("rowwise")
            assert all((inductor.cost < cost) == (choice == "inductor") for cost in others.values())
    assert isinstance(InductorCuda().claim(list(SMALL.calls()), Target.detect("cpu"), BUCKET), No)
    assert [one.name for one in backends_named(BACKEND_CHOICES["cuda"]["auto"], "cuda")].index("inductor") == 2


def test_what_code_for_a_gpu_is_made_with(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler there is no region, and all else is compiled: the toolchain says so and raises nothing."""
    there = InductorCuda().toolchain()
    assert there.keys() == {"torch", "triton", "c++"} and "none" not in there.values()
    monkeypatch.setenv("CXX", "/nonexistent")
    assert InductorCuda().toolchain() == {**there, "c++": "none"}
    assert {"emit_cuda.py", "emit.py", "compile.py", "dense.py"} <= {path.name for path in InductorCuda().sources()}
    assert "load.py" not in {path.name for path in InductorCuda().sources()}
