"""What the tensorrt backend takes, and what it refuses: calls, versions, packages, GPUs, and networks."""

import sys
from pathlib import Path

import fake_tensorrt
import pytest
import torch
from every_op import every_op
from onnx_cases import REFUSED
from staged import BUCKET
from tensorrt_world import LAYER, TARGET, World, backend

import ingot.backends.tensorrt.emit as emit_side
import ingot.backends.tensorrt.library as library_side
from ingot.backends.tensorrt.emit import Tensorrt
from ingot.backends.tensorrt.load import load
from ingot.backends.tensorrt.record import NATIVE
from ingot.compile.competing import competitors, on_request
from ingot.compile.identity import exe_document
from ingot.ir import ops
from ingot.ir.artifact.plan import Executable
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError, TargetError
from ingot.ir.machine.target import Target
from ingot.ir.parse import parse_program
from ingot.ir.program import Region
from ingot.runtime.loading.load_context import on_one_device


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_translation_is_refused_by_name(kind: str) -> None:
    assert backend().claim([REFUSED[kind].node()], TARGET, BUCKET) == No(REFUSED[kind].reason)


def test_claims() -> None:
    every = every_op([torch.bfloat16])
    nodes = [one for one in every.body.calls() if one.target is not ops.quant_linear.overload]
    answer = backend().claim(nodes, TARGET, BUCKET)
    assert isinstance(answer, Yes) and not answer.timed and list(answer.layouts) == ["weight"]
    assert backend().claim(nodes, Target.detect("cpu"), BUCKET) == No("not for device 'cpu'")
    assert Tensorrt(missing=lambda target: f"no {target}").claim(nodes, TARGET, BUCKET) == No("no sm_90")
    with pytest.raises(BackendError, match="builds no engine: no sm_90"):
        Tensorrt(missing=lambda target: f"no {target}").emit(every.body, "key", TARGET, Path())


@pytest.mark.parametrize("version", ["10.16.1.11", "12.0.0.1", "eleven", None])
def test_a_version_that_was_never_tried(version: str | None, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.module(version))
    with pytest.raises(TargetError, match=f"its version is {version or 'unknown'}") as caught:
        backend().toolchain()
    assert caught.value.expected == "11.0 or newer, below 12.0"
    with pytest.raises(TargetError, match="its version is"):
        load(Executable(id="e", backend="tensorrt", inputs=(), outputs=(), files=()), Path(), on_one_device("cpu"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.setattr("ingot.ir.machine.extras.is_installed", lambda module: module != "tensorrt")
    missing = "needs the package 'tensorrt-cu13', which is not installed"
    with pytest.raises(TargetError, match=missing) as caught:
        Tensorrt().toolchain()
    assert caught.value.hint == "pip install 'ingot[tensorrt]'"
    assert missing in on_request(TARGET)["tensorrt"]
    with pytest.raises(TargetError, match=f"the backend 'tensorrt' compiles nothing for sm_90 here: it {missing}"):
        competitors("auto,tensorrt", TARGET)
    assert "tensorrt" not in [one.name for one in competitors("auto", TARGET).backends]


def test_a_package_without_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.ir.machine.extras.is_installed", lambda module: True)

    def fail(name: str) -> None:
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(library_side, "import_module", fail)
    with pytest.raises(TargetError, match=r"TensorRT, which does not load: libnvinfer.so.11: cannot open"):
        Tensorrt().toolchain()


def test_another_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Target.named("sm_80")
    monkeypatch.setattr(library_side.Target, "detect", lambda device: other)
    reason = "it builds engines for sm_90 only on such a GPU; the GPU of this machine: sm_80"
    assert library_side.missing_here("sm_90") == reason and library_side.missing_here("sm_80") == ""
    assert on_request(TARGET)["tensorrt"] == reason
    assert [one.name for one in competitors("tensorrt", other).backends] == [
        "tensorrt",
        "triton",
        "reference",
        "rowwise",
    ]


def test_the_identity_has_version_and_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region("r0", parse_program(LAYER), "tensorrt")
    first = exe_document(region, backend(), TARGET)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.module("11.4.0.106"))
    second = exe_document(region, backend(), TARGET)
    monkeypatch.setattr(emit_side, "product_here", lambda: "NVIDIA H100")
    third = exe_document(region, backend(), TARGET)
    assert len({str(one) for one in (first, second, third)}) == 3
    assert backend().toolchain().keys() == {"tensorrt", "onnx", "gpu"}


def test_what_tensorrt_refuses_is_named(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = parse_program(LAYER)
    monkeypatch.setattr(fake_tensorrt, "PARSED", fake_tensorrt.PARSED - {"Gemm"})
    with pytest.raises(
        BackendError, match=r"does not parse the ONNX model: no importer is registered \(node n\d+, Gemm\)"
    ):
        backend().emit(body, "key", TARGET, tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.module())
    monkeypatch.setattr("ingot.backends.tensorrt.profile.profile_of", lambda body: {})
    with pytest.raises(BackendError, match="does not build an engine: no range of shapes for") as caught:
        backend().emit(body, "key", TARGET, tmp_path)
    assert caught.value.where == "region layer"


def test_native_dtypes_are_those_of_the_documentation() -> None:
    assert NATIVE.products == {torch.bfloat16} and NATIVE.moves == {torch.bfloat16, torch.float16}
