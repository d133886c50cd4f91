"""Compiling for a GPU that this machine does not have, and what becomes of such an artifact here."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn_in_one_of
from resign import edit_json
from sm_90 import NO_GPU, kernels_artifact, unplug

import ingot.ir.machine.target
import ingot.serve.llm
from ingot import LLM, bisect, compile_model
from ingot.backends.cpu.emit import Cpu
from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.cli.views.plan import read_plans
from ingot.compile.buckets import bucket_classes
from ingot.compile.identity import exe_document
from ingot.compile.request import Request
from ingot.debug.explain import explain
from ingot.debug.requested_step import RequestedStep
from ingot.debug.verify import verify
from ingot.ir.artifact.manifest import GOLDEN, REQUEST
from ingot.ir.artifact.manifest_file import MANIFEST
from ingot.ir.errors import ArtifactError, OptionError, TargetError
from ingot.ir.machine.gpus import TYPICAL, Gpu
from ingot.ir.machine.target import Target
from ingot.ir.parse import parse_programs
from ingot.ir.program import VIEWS, op_counts, target_name
from ingot.runtime.cuda.graphs.sizes import is_capturable
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.check_target import check_target
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.loading.phases import Phases

pytestmark = pytest.mark.one_in_file(3)

NAME = "llama-plain"
OPTIONS: dict[str, Any] = {"target": "sm_90", "backend": "reference", "max_batch": 4, "max_tokens": 128}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests see a machine without a GPU, wherever they run."""
    unplug(monkeypatch)


def plug_in(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setattr(ingot.ir.machine.target, "find_gpu", lambda: gpu)


@pytest.fixture(scope="module")
def made(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact for sm_90, of references alone."""
    with pytest.MonkeyPatch.context() as patch:
        unplug(patch)
        report = compile_model(checkpoint(NAME), tmp_path_factory.mktemp("gpu") / "a.ingot", **OPTIONS)
    assert report.no_golden_run == NO_GPU
    return report.output


def test_it_says_what_it_is_for_and_has_no_golden_run(made: Path) -> None:
    manifest = json.loads((made / MANIFEST).read_text())
    assert manifest["target"]["name"] == "sm_90" and manifest["target"]["sm"] == 90 and manifest["versions"] == {}
    assert "dependent_launch" in manifest["target"]["features"]
    assert json.loads((made / REQUEST).read_text())["options"]["target"] == "sm_90"
    assert not (made / GOLDEN).exists()


def test_nothing_here_runs_it(made: Path) -> None:
    for run in (load_artifact, LLM, verify):
        with pytest.raises(TargetError, match=f"compiled for a GPU, sm_90, and {NO_GPU}"):
            run(made)


def test_a_model_begins_a_context_only_where_it_will_serve_on_a_gpu(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begin(phases: Phases) -> None:
        raise Begun

    monkeypatch.setattr(ingot.serve.llm, "begin_context", begin)
    with pytest.raises(Begun):
        LLM(made)
    with pytest.raises(ArtifactError, match="not there"):
        LLM(tmp_path / "missing.ingot")
    with pytest.raises(TargetError, match=NO_GPU):
        load_artifact(made)
    edit_json(shutil.copytree(made, tmp_path / "a.ingot"), MANIFEST, lambda manifest: manifest["target"].clear())
    with pytest.raises(TargetError, match="another target"):
        LLM(tmp_path / "a.ingot")


def test_bisect_judges_its_programs_and_not_its_execution(made: Path) -> None:
    with pytest.raises(TargetError, match=f"compiled for a GPU, sm_90, and {NO_GPU}"):
        bisect(made)


def test_another_gpu_is_refused_by_the_field_that_differs(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = open_artifact(made).manifest
    plug_in(monkeypatch, TYPICAL["sm_80"])
    with pytest.raises(TargetError, match="another target: name: sm_90 against sm_80"):
        check_target(manifest)
    fewer = replace(TYPICAL["sm_90"], cores=114, product="NVIDIA H100 PCIe", links=True, driver="12.8")
    plug_in(monkeypatch, fewer)
    check_target(manifest)
    monkeypatch.setattr(ingot.ir.machine.target.platform, "machine", lambda: "aarch64")
    with pytest.raises(TargetError, match="another target: arch: "):
        check_target(manifest)


def test_a_machine_without_the_bindings_says_what_to_install(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, TYPICAL["sm_90"])
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(TargetError, match="needs the package 'cuda-bindings'") as caught:
        load_artifact(made)
    assert caught.value.hint == "pip install 'ingot[cuda]'"


def test_an_artifact_for_a_cpu_asks_for_no_gpu(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not() -> Gpu:
        raise AssertionError("a GPU was looked for")

    monkeypatch.setattr(ingot.ir.machine.target, "find_gpu", must_not)
    report = compile_model(checkpoint(NAME), tmp_path / "a.ingot", **{**OPTIONS, "target": "cpu"})
    assert not report.no_golden_run
    assert load_artifact(report.output, num_pages=8).limits.max_batch == 4
    assert verify(report.output).holds


@pytest.mark.xdist_group("sm-90-kernels")
def test_kernels_are_compiled_without_a_gpu(artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that computes in a decode step nothing is left to references, and what was made is code for the GPU."""
    made = kernels_artifact(artifact, monkeypatch)
    (plan,) = read_plans(open_artifact(made)).plans.values()
    assert [bucket.bucket.name for bucket in plan.buckets] == ["decode-1", "decode-16"]
    for bucket in plan.buckets:
        left = [one for one in bucket.instructions if one.backend not in ("triton", "cublas")]
        assert {one.target for one in left} <= {target_name(view) for view in VIEWS}
    cubins = list((made / "exe" / "sm_90").rglob("*.cubin"))
    assert {path.parent.name for path in cubins} == set(plan.executables)
    for path in cubins:
        header = path.read_bytes()[:20]
        assert header[:4] == b"\x7fELF" and int.from_bytes(header[18:20], "little") == 190, "EM_CUDA of elf.h"


@pytest.mark.xdist_group("sm-90-kernels")
@pytest.mark.parametrize("deterministic", drawn_in_one_of(2, [False, True]))
def test_experts_are_compiled_without_a_gpu(
    artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Nothing of a router and its experts is left to references, so a graph can hold all steps.

    The last launch of the experts adds the residual stream: no call comes between them and the next layer's norm.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    limits = {"dtype": "bfloat16", "max_batch": 2, "max_tokens": 2, "deterministic": deterministic}
    made = artifact("mixtral-cut", target="sm_90", backend="triton", **limits)
    (plan,) = read_plans(open_artifact(made)).plans.values()
    programs = list(parse_programs(open_artifact(made).read_text("program.ir")))
    for bucket, program in zip(plan.buckets, programs, strict=True):
        found = {one.target: one.backend for one in bucket.instructions}
        regions = {frozenset(op_counts(one.body)): one.backend for one in program.regions.values()}
        added = regions[frozenset({"ingot.experts", "aten.add.Tensor"})]
        assert found["ingot.route"] == added == "triton" and is_capturable(bucket)
        assert not {"ingot.experts", "aten.add.Tensor"} & found.keys()
    (decode, *_) = explain(made, RequestedStep(tokens=1, context=8)).buckets
    assert decode.time is not None and "experts with add" in [gap.what for gap in decode.time.gaps]
    launches = [json.loads(path.read_text()) for path in (made / "exe" / "sm_90").rglob("launches.json")]
    entries = [launch["entry"] for one in launches for launch in one["launches"] if "experts" in launch["entry"]]
    alone = {"experts_up_rows", "experts_down_rows"}
    blocks = {"experts_up_tile", "experts_down_tile"}
    assert set(entries) == (blocks if deterministic else alone | blocks)


# --- requests ---------------------------------------------------------------------------------------------------------


def request(checkpoint: Callable[[str], Path], **options: Any) -> Request:
    return Request.read(checkpoint(NAME), **{**OPTIONS, **options})


def test_the_options_of_a_request_give_it_again(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch, replace(TYPICAL["sm_90"], cores=114))
    for name in ("auto", "cuda", "sm_90"):
        read = request(checkpoint, target=name)
        assert read.options["target"] == "sm_90" and read.target.cores == 114
        again = Request.read(checkpoint(NAME), **read.options)
        assert (again.target, again.options) == (read.target, read.options)
    assert request(checkpoint, target="cpu").options["target"] == "cpu"
    assert request(checkpoint, target="sm_80").target.gpu == "NVIDIA A100 80GB SXM"


def test_the_usual_step_is_that_of_the_device(checkpoint: Callable[[str], Path]) -> None:
    def sizes(**options: Any) -> Any:
        read = Request.read(checkpoint(NAME), backend="reference", **options).options
        return read["max_batch"], read["max_tokens"]

    assert sizes(target="sm_90") == (256, 8192) and sizes(target="cpu") == (64, 2048)
    assert sizes(target="sm_90", max_tokens=200) == (200, 200) and sizes(target="cpu", max_tokens=200) == (64, 200)
    assert sizes(target="sm_90", max_tokens=200, max_batch=64) == (64, 200)
    with pytest.raises(OptionError, match="max_tokens is 0"):
        sizes(target="cpu", max_tokens=0)


def test_auto_takes_the_cpu_where_there_is_no_gpu_and_cuda_insists(checkpoint: Callable[[str], Path]) -> None:
    assert request(checkpoint, target="auto").target.name == "cpu"
    with pytest.raises(TargetError, match=NO_GPU):
        request(checkpoint, target="cuda")


@pytest.mark.parametrize(
    ("target", "backend", "what", "expected"),
    [
        ("sm_90", "cpu", "unknown backend 'cpu'", "auto, triton, inductor, tensorrt, reference"),
        ("cpu", "triton", "the backend 'triton' is not for the target cpu", "auto, inductor, onnx, reference"),
        ("cpu", "cuda", "unknown backend 'cuda'", "auto, inductor, onnx, reference"),
    ],
)
def test_a_backend_that_is_not_for_the_target(
    checkpoint: Callable[[str], Path], target: str, backend: str, what: str, expected: str
) -> None:
    with pytest.raises(OptionError) as caught:
        request(checkpoint, target=target, backend=backend)
    assert caught.value.what == what and caught.value.expected == f"{expected}, for the target {target}"


def test_inductor_by_name_says_why_it_compiles_nothing_here(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(
        TargetError, match=r"compiles nothing for sm_90 here: .* the GPU of this machine: none"
    ) as caught:
        request(checkpoint, backend="inductor")
    assert "--backend auto" in caught.value.hint


def test_code_that_is_linked_with_torch_wants_the_same_torch(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = open_artifact(made).manifest
    plug_in(monkeypatch, replace(TYPICAL["sm_90"], driver="99.0"))
    same = manifest.model_copy(update={"versions": {"torch": torch.__version__}})
    check_target(same)
    with pytest.raises(TargetError, match=r"another target: versions\.torch: 0\.1 against "):
        check_target(manifest.model_copy(update={"versions": {"torch": "0.1"}}))


def test_a_machine_without_triton_says_what_to_install(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(TargetError, match="compiling for a GPU needs the package 'triton'") as caught:
        request(checkpoint, backend="triton")
    assert caught.value.hint == "pip install 'ingot[cuda]'"


def test_bfloat16_needs_a_gpu_that_has_it(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, Gpu("NVIDIA T4", 75, 16 * 10**9, 40, 320 * 10**9))
    with pytest.raises(TargetError, match="the model's dtype is bfloat16, which sm_75 does not compute") as caught:
        request(checkpoint, target="cuda", dtype="bfloat16")
    assert caught.value.expected == "a GPU with bf16: sm_80 or newer"
    assert request(checkpoint, target="cuda", dtype="float16").target.sm == 75
    assert request(checkpoint, target="sm_80", dtype="bfloat16").target.sm == 80


CPU, GPU = (Inductor(), Cpu(), Reference()), (Inductor(), Reference())  # of each something that emits


# Classes of few tokens, as many as there are.
FEW = "decode-1 1-1, decode-16 2-16, decode-32 17-32, decode-64 33-64"


@pytest.mark.parametrize(
    ("target", "most", "batch", "expected"),
    [
        ("sm_90", 2048, 64, f"{FEW}, extend 65-2048"),
        ("sm_90", 2048, 65, f"{FEW}, decode-512 65-65 of one, extend 65-2048"),
        ("sm_90", 2048, 256, f"{FEW}, decode-512 65-256 of one, extend 65-2048"),
        ("sm_90", 2048, 1024, f"{FEW}, decode-512 65-512 of one, extend 65-2048"),
        ("sm_90", 65, 65, f"{FEW}, decode-512 65-65 of one, extend 65-65"),
        ("sm_90", 64, 64, FEW),
        ("sm_90", 20, 20, "decode-1 1-1, decode-16 2-16, decode-32 17-20"),
        ("sm_90", 1, 1, "decode-1 1-1"),
        ("cpu", 2048, 256, "decode 1-16, extend 17-2048"),
        ("cpu", 16, 4, "decode 1-16"),
        ("cpu", 3, 1, "decode 1-3"),
    ],
)
def test_bucket_classes(target: str, most: int, batch: int, expected: str) -> None:
    machine, backends = Target.named(target), CPU if target == "cpu" else GPU
    found = bucket_classes(machine, backends, most, batch, deterministic=False)
    named = (f"{one.name} {one.tokens[0]}-{one.tokens[1]}{' of one' if one.q_max == 1 else ''}" for one in found)
    assert ", ".join(named) == expected
    for deterministic in (True, False):
        (whole,) = bucket_classes(machine, (Reference(), Rowwise()), most, batch, deterministic=deterministic)
        assert (whole.name, whole.tokens, whole.batch_invariant) == ("any", (1, most), deterministic)


@pytest.mark.parametrize(
    ("target", "most", "expected"),
    [
        ("sm_90", 2048, "decode-16 1-16, decode-32 17-32, decode-64 33-64, extend 65-2048"),
        ("sm_90", 20, "decode-16 1-16, decode-32 17-20"),
        ("cpu", 2048, "any 1-2048"),
    ],
)
def test_bucket_classes_of_deterministic_mode(target: str, most: int, expected: str) -> None:
    """Wide steps of one token each have no class of their own: their attention is that of prompts."""
    machine, backends = Target.named(target), CPU if target == "cpu" else GPU
    found = bucket_classes(machine, backends, most, most, deterministic=True)
    assert ", ".join(f"{one.name} {one.tokens[0]}-{one.tokens[1]}" for one in found) == expected
    assert all(one.batch_invariant and one.q_max is None for one in found)


def test_kernels_are_divided_by_multiprocessors_and_keyed_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    here = exe_document(None, Reference(), Target.named("sm_90"))
    plug_in(monkeypatch, replace(TYPICAL["sm_90"], cores=114, memory=1, product="other", bandwidth=None, driver="99.0"))
    there = exe_document(None, Reference(), Target.named("sm_90"))
    assert {key for key in here if here[key] != there[key]} == {"target"}
    assert {key for key in here["target"] if here["target"][key] != there["target"][key]} == {"cores"}


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_shows_another_target(capsys: pytest.CaptureFixture[str]) -> None:
    from ingot.cli.commands.target import show_target

    show_target(target="sm_80", json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["target"]["name"] == "sm_80" and not answer["runs_here"] and answer["missing_here"] == NO_GPU
    features = {one["name"]: one for one in answer["features"]}
    assert features["bf16"]["there"] and not features["dependent_launch"]["there"]
    assert features["dependent_launch"]["needs"] == "sm_90 or newer"
    assert set(answer["tools"]) == {"c++", "nvcc", "triton", "ptxas", "flashinfer-python", "cuda-bindings"}
    assert {"1", "512"} == set(answer["ops"][0]["backends"])
    show_target(target="sm_80")
    text = capsys.readouterr().out
    assert "NVIDIA A100" in text and "2.0 TB/s" in text and f"no: {NO_GPU}" in text
    assert "a kernel starts when the one before it has ended" in text


@pytest.mark.parametrize("static", [True, False])
def test_a_compiler_that_links_statically_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, static: bool
) -> None:
    from ingot.compile.tools import tools_found

    wrapper = tmp_path / "c++"
    wrapper.write_text(f'#!/bin/sh\nexec g++ {"-static-libstdc++" if static else ""} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    assert ("links libstdc++ statically" in tools_found()["c++"]) is static


def test_tools_that_are_missing_say_what_that_means(monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.compile.tools import tools_found

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", none)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = tools_found()
    assert found["c++"].startswith("none: ") and found["nvcc"].startswith("none")
    assert found["triton"] == "none: compiling for a GPU needs it (pip install 'ingot[cuda]')"
    assert found["flashinfer-python"].endswith(
        "Ingot's kernels compute prefill attention (pip install 'ingot[flashinfer]')"
    )
    assert found["cuda-bindings"] == "none: running on a GPU needs it (pip install 'ingot[cuda]')"
