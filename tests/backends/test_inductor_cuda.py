"""Regions for GPUs where none need be: who computes what, and what a machine lacks that compiles none."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_model import MODEL
from staged import BUCKET, Limits, pass_context, traced
from wrapped_compiler import wrapper

import ingot.backends.inductor.emit_cuda as emit_cuda
import ingot.ir.machine.target
from ingot.backends.inductor.emit_cuda import InductorCuda, missing_here
from ingot.backends.inductor.library import open_library
from ingot.compile.buckets import bucket_classes
from ingot.compile.competing import competing
from ingot.compile.contents import linked_with
from ingot.compile.merged_plans import merged_plans
from ingot.compile.op_claims import one_call_of_each
from ingot.ir.backend import No, Yes
from ingot.ir.errors import TargetError
from ingot.ir.machine.gpus import TYPICAL
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.passes.manager import Lowered, run_pipeline
from ingot.passes.pipeline import edit_pipeline
from ingot.runtime.cuda.graphs.sizes import is_capturable

SMALL = parse_program("""program small stage=FUSED
dim T in [1, 4]
input x: f32[T, 8]
%mul = aten.mul.Tensor(%x, 3) : f32[T, 8]
return y=%mul
""")
CUDA_HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has a GPU, and all that compiling for it needs."""
    monkeypatch.setattr(ingot.ir.machine.target, "find_gpu", lambda: TYPICAL["sm_90"])
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
            lambda patch, toolkit: patch.setattr(ingot.ir.machine.target, "find_gpu", _no_gpu),
            ".* the GPU of this machine: none$",
        ),
        (
            lambda patch, toolkit: patch.setattr(ingot.ir.machine.target, "find_gpu", lambda: TYPICAL["sm_80"]),
            ".* the GPU of this machine: sm_80$",
        ),
        (
            lambda patch, toolkit: patch.setattr(emit_cuda.importlib.util, "find_spec", lambda name: None),
            "it needs Triton",
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


def test_the_order_of_backends_on_a_gpu(toolkit: Path) -> None:
    """Where others have kernels inductor is behind them, and in front of the reference; by name in front of all."""
    target = Target.named("sm_90")
    _, calls = one_call_of_each(OPS, torch.bfloat16)
    for choice in ("auto", "inductor"):
        backends = competing(choice, target)
        for name, call in calls.items():
            claims = {backend.name: backend.claim([call], target, BUCKET) for backend in backends}
            inductor = claims["inductor"]
            if not OPS[name.removeprefix("ingot.")].fusible:
                assert inductor == No(f"{name} is not fusible")
                continue
            if OPS[name.removeprefix("ingot.")].needs_kernel:
                assert inductor == No(f"on a GPU {name} needs a kernel that was measured there")
                continue
            assert isinstance(inductor, Yes) and not inductor.batch_invariant
            others = {name: one.cost for name, one in claims.items() if isinstance(one, Yes) and name != "inductor"}
            assert inductor.cost < others.pop("reference") and inductor.cost < others.pop("rowwise")
            assert all((inductor.cost < cost) == (choice == "inductor") for cost in others.values())
    assert isinstance(InductorCuda().claim(list(SMALL.calls()), Target.detect("cpu"), BUCKET), No)


def test_what_code_for_a_gpu_is_made_with(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler there is no region, and all else is compiled: the toolchain says so and raises nothing."""
    there = InductorCuda().toolchain()
    assert there.keys() == {"torch", "triton", "ptxas", "c++", "gpu"} and "none" not in there.values()
    (toolkit / "include" / "cuda.h").unlink()
    assert InductorCuda().toolchain() == {**there, "c++": "none"}
    monkeypatch.setattr(ingot.ir.machine.target, "find_gpu", _no_gpu)
    assert InductorCuda().toolchain() == {**there, "c++": "none", "gpu": "none"}
    monkeypatch.setenv("CXX", "/nonexistent")
    assert InductorCuda().toolchain() == {**there, "c++": "none", "gpu": "none"}
    assert {"emit_cuda.py", "emit.py", "compile.py", "dense.py"} <= {path.name for path in InductorCuda().sources()}
    assert "load.py" not in {path.name for path in InductorCuda().sources()}


# Calls of a library.


def test_a_library_that_finds_no_memory_is_told_from_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's count tells; the next failure without another lack of memory is a failure."""
    stats, lacks = {"num_ooms": 3}, [True, False]

    class Runner:
        def __init__(self, path: str, models: int, device: str, kernels: str, single_threaded: bool) -> None:
            assert (models, device, kernels, single_threaded) == (1, "cuda", "", True)

        def run(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
            if not args:
                stats["num_ooms"] += lacks.pop(0)
                raise RuntimeError("run_func_ failed")
            return args

    monkeypatch.setattr(torch._C._aoti, "AOTIModelContainerRunnerCuda", Runner, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    run = open_library(Path("region_cuda.so"))
    with pytest.raises(torch.OutOfMemoryError, match="a compiled region ran out of GPU memory: run_func_ failed"):
        run([])
    with pytest.raises(RuntimeError, match="run_func_ failed") as caught:
        run([])
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    tensor = torch.ones(1)
    assert run([tensor])[0] is tensor


# What the pipeline makes of it.


def lowered(passes: str, choice: str) -> Lowered:
    """A tiny model for a GPU with nothing compiled, in its first bucket class and its last."""
    target, limits = Target.named("sm_90"), Limits(max_seq_len=256, max_batch=64, max_tokens=256)
    backends = competing(choice, target)
    context: dict[str, Any] = {"target": target, "backends": backends, "bucket": None}
    context["measure"] = lambda regions, sizes: {region.name: 0 for region in regions}
    first, *_, last = bucket_classes(target, backends, limits.max_tokens, limits.max_batch, deterministic=False)
    return run_pipeline(
        traced(MODEL.config, limits), pass_context(limits, **context), (first, last), edit_pipeline(passes)
    )


def test_calls_without_a_kernel_become_regions_and_graphs_hold_them(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = 'default,quantize{format="u4/1x32:f32:offsets/low_first"}'  # has no kernel
    made = lowered(quantized, "auto")
    assert linked_with(merged_plans({"main": made})) == ("torch",)
    for name, program in made.programs.items():
        assert program.plan is not None
        (bucket,) = program.plan.buckets
        assert "ingot.quant_linear" not in {one.target for one in bucket.instructions}, name
        assert is_capturable(bucket) and bucket.nodes_per_backend()["inductor"] == 4 * 3, name
        regions = [region for region in program.regions.values() if region.backend == "inductor"]
        of_regions = [(dim, size) for region in regions for dim, size in region.body.dims.items()]
        assert all(program.dims[dim] == size for dim, size in of_regions), "one for all bucket classes"
    monkeypatch.setattr(ingot.ir.machine.target, "find_gpu", _no_gpu)
    without = lowered(quantized, "auto")
    assert linked_with(merged_plans({"main": without})) == ()
    for program in without.programs.values():
        assert program.plan is not None and not is_capturable(program.plan.buckets[0])
    reasons = {refusal.reason for record in without.records for refusal in record.refusals}
    assert "inductor: it compiles for sm_90 only on such a GPU; the GPU of this machine: none" in reasons


def test_by_name_inductor_takes_all_that_has_no_state(toolkit: Path) -> None:
    for name, program in lowered("default", "inductor").programs.items():
        assert program.plan is not None
        (bucket,) = program.plan.buckets
        assert set(bucket.nodes_per_backend()) == {"inductor", "triton"} and is_capturable(bucket), name
        triton = {one.target for one in bucket.instructions if one.backend == "triton"}
        assert not triton & {"ingot.linear", "ingot.rms_norm", "ingot.silu_mul", "ingot.cast"}, name
