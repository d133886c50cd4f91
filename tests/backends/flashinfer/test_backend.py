"""The flashinfer backend with a stand-in for what nvcc builds: what it claims, how it builds, what it hands over."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from call_oracle import difference
from fake_flashinfer import install
from one_call import MAX_TOKENS, OneCall
from paged_steps import Heads, PagedStep, paged_step

from ingot.backends.flashinfer import library
from ingot.backends.flashinfer.build import KERNELS
from ingot.backends.flashinfer.emit import FlashInfer
from ingot.backends.flashinfer.library import _Call
from ingot.backends.flashinfer.load import load
from ingot.backends.flashinfer.packages import Missing, Packages, find_packages
from ingot.backends.triton.emit import Triton
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError, InternalError
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.passes.base import PassContext
from ingot.passes.choose_backends import ChooseBackends
from ingot.passes.rewrite import Rewriter
from ingot.runtime.loading.load_context import on_one_device

HOPPER = Target.named("sm_90")
EXTEND = BucketClass(name="extend", tokens=(65, MAX_TOKENS))
HEADS = Heads(4, 2, 64)
Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Makes this a machine that has FlashInfer and nvcc; gives the folder of both."""

    def make(**options: Any) -> Path:
        install(tmp_path, **options)
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
        find_packages.cache_clear()
        return tmp_path

    yield make
    find_packages.cache_clear()


@pytest.fixture
def on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no GPU is, torch gives no stream of one, and makes tensors by the function's twin."""
    monkeypatch.setattr(library, "current_stream", lambda device: 77)
    monkeypatch.setattr(library, "new_tensor", torch._C._dynamo.guards._empty_strided_cpu)


def a_step(mix: list[tuple[int, int]] | None = None, heads: Heads = HEADS, **layout: int) -> PagedStep:
    return paged_step(torch.Generator().manual_seed(5), torch.bfloat16, heads, mix or [(66, 9)], **layout)


def attention(step: PagedStep, *rest: torch.Tensor, **options: Any) -> OneCall:
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
    return OneCall("paged_attention", (step.q, kv, *step.lens, *rest), {"scale": 0.2, **options})


def claim(call: OneCall, target: Target = HOPPER, bucket: BucketClass = EXTEND) -> Yes | No:
    return FlashInfer().claim([call.call_of(call.body())], target, bucket)


def built(call: OneCall, folder: Path, target: Target = HOPPER) -> Callable[..., list[torch.Tensor]]:
    """What is loaded of an emitted call."""
    folder.mkdir()
    return load(FlashInfer().emit(call.body(), "key", target, folder), folder, on_one_device("cpu"))


# --- what it needs ----------------------------------------------------------------------------------------------------


def test_it_finds_packages_and_versions_without_importing_any(machine: Machine) -> None:
    folder, found = machine(), find_packages()
    assert isinstance(found, Packages) and found.nvcc == folder / "toolkit/bin/nvcc"
    assert found.versions["flashinfer"] == "0.6.13" and found.versions["nvcc"] == "13.0.88"
    assert FlashInfer().toolchain() == found.versions and len(found.headers) == 6


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        ("site/flashinfer", "FlashInfer is not installed"),
        ("site/flashinfer_python-0.6.13.dist-info", "has no package metadata"),
        ("site/flashinfer/data/cccl/cub", "this FlashInfer has no data folder cccl/cub"),
        ("toolkit/bin/nvcc", "nvcc was not found"),
        ("toolkit/include/curand_kernel.h", "the headers of cuRAND were not found"),
    ],
)
def test_what_is_missing_is_the_reason_of_the_refusal(
    machine: Machine, gone: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = machine() / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setattr("ingot.backends.flashinfer.packages._folders_with", lambda header: iter(()))
    found, refused = find_packages(), claim(attention(a_step()))
    assert isinstance(found, Missing) and reason in found.reason
    assert refused == No(found.reason) and FlashInfer().toolchain() == {"flashinfer": "none"}
    with pytest.raises(BackendError, match=re.escape(found.reason)):
        FlashInfer().emit(attention(a_step()).body(), "key", HOPPER, path)


# --- what it claims ---------------------------------------------------------------------------------------------------


def choose(call: OneCall, target: Target = HOPPER) -> tuple[str, list[str]]:
    """The backend that compiling takes, and the refusals."""
    program = call.body()
    backends = (FlashInfer(), Triton())
    context = PassContext(
        target, max_seq_len=160, max_batch=64, max_tokens=256, backends=backends, bucket=program.bucket
    )
    rewriter = Rewriter(program)
    ChooseBackends().run(rewriter, context)
    return call.call_of(program).meta["backend"], [one.reason for one in rewriter.refusals]


def test_prompts_are_its_own_and_decoding_is_not(machine: Machine) -> None:
    machine()
    steps = (a_step([(1, 30)]), a_step([(1, 3)] * 64), a_step())
    chosen = {len(step.q): choose(attention(step)) for step in steps}
    reason = "flashinfer: the kernels are for steps of more than 64 tokens, and these have {}"
    assert chosen == {
        1: ("triton", [reason.format(1)]),
        64: ("triton", [reason.format(64)]),
        66: ("flashinfer", []),
    }


def test_where_ours_is_faster_it_is_a_candidate(machine: Machine) -> None:
    machine()
    assert choose(attention(a_step()), Target.named("sm_80")) == ("triton", [])


def test_refusals(machine: Machine) -> None:
    machine()
    assert isinstance(claim(attention(a_step())), Yes)
    assert isinstance(claim(attention(a_step(), mask="window_7", soft_cap=3.0)), Yes)
    assert isinstance(claim(attention(a_step()), Target.named("sm_80")), Yes)
    wide = a_step()
    odd = torch.randn(66, 4 * 68, dtype=torch.bfloat16).view(66, 4, 68)[:, :, :64]
    whole = OneCall("paged_attention", tuple(part.float() for part in (wide.q, wide.kv)) + wide.lens, {"scale": 1.0})
    narrow = OneCall("paged_attention", (wide.q, wide.kv.to(torch.float8_e4m3fn), *wide.lens), {"scale": 1.0})
    strided = OneCall("paged_attention", (odd, *attention(wide).args[1:]), {"scale": 1.0})
    two_widths, shared = (a_step(heads=Heads(4, 2, 64, 32, shared=shared)) for shared in (False, True))
    tree = (*attention(wide).args[:6], None, torch.zeros(66, dtype=torch.int64))
    refused = {
        "keys of 64 numbers and values of 32, and": attention(two_widths),
        "keys of 64 numbers, of which 32 are values, and": attention(shared, value_width=32),
        "no kernel for f32": whole,
        "the kernels are built for caches of q's dtype, and this one is of f8e4m3": narrow,
        "no kernel for attention sinks": attention(a_step(), torch.zeros(4)),
        "no kernel for slopes of positions (ALiBi)": attention(a_step(), None, None, None, torch.zeros(4)),
        "no kernel for the mask chunked_8": attention(a_step(), mask="chunked_8"),
        "no kernel for the mask bidirectional": attention(a_step(), mask="bidirectional"),
        "no kernel for the mask tree": OneCall("paged_attention", tree, {"scale": 1.0, "mask": "tree"}),
        "heads of 48 elements, and the kernels support 64, 128, 256": attention(a_step(heads=Heads(4, 2, 48))),
        "the strides of q are not multiples of 16 bytes": strided,
        "no kernel for ingot.silu_mul": OneCall("silu_mul", (torch.zeros(66, 8), torch.zeros(66, 8))),
    }
    for reason, call in refused.items():
        answer = claim(call)
        assert isinstance(answer, No) and reason in answer.reason, answer
    assert claim(attention(a_step()), Target.detect("cpu")) == No("not for device 'cpu'")


# --- what it builds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sm", "kernel", "arch"), [(80, "fa2", "80"), (90, "fa3", "90a"), (100, "fa2", "100")])
def test_the_kernel_and_the_code_follow_from_the_gpu(machine: Machine, sm: int, kernel: str, arch: str) -> None:
    folder = machine(build="touch attention.so")
    FlashInfer().emit(
        attention(a_step(), mask="window_7").body(), "key", Target.named("sm_90").model_copy(update={"sm": sm}), folder
    )
    told = (folder / "nvcc.log").read_text()
    assert f"code=sm_{arch} " in told and told.strip().endswith(f"kernels/{kernel}.cu")
    for define in ("HEADS=4", "KV_HEADS=2", "DIM=64", "PAGE=16", "SCALE=0.2", "WINDOW=7", "Q_TOKEN=512", "BF16=1"):
        assert f"-DINGOT_{define} " in told, define


def test_what_nvcc_says_is_the_error(machine: Machine) -> None:
    folder = machine(build="echo 'fa3.cu(3): error: no such thing' >&2; exit 1")
    with pytest.raises(BackendError, match=r"nvcc cannot build FlashInfer's fa3: fa3.cu\(3\): error: no such thing"):
        FlashInfer().emit(attention(a_step()).body(), "key", HOPPER, folder)


def test_everything_that_decides_the_code_is_in_the_key() -> None:
    names = {path.name for path in FlashInfer().sources()}
    kernels = {path.name for path in KERNELS.iterdir()}
    assert kernels | {"emit.py", "build.py", "library.py"} <= names and "load.py" not in names


# --- what it hands over -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_a_stream")
def test_a_built_call_gives_what_the_reference_gives(machine: Machine, tmp_path: Path) -> None:
    machine()
    mix = [(40, 0), (0, 3), (21, 33), (6, 1)]
    for number, options in enumerate(({}, {"mask": "window_9"})):
        call = attention(a_step(mix, gap=1, behind=2), **options)
        folder = tmp_path / f"out{number}"
        run = built(call, folder)
        problem = difference(call, run(*call.tensors))
        assert problem is None, problem
        sizes = {"T": 4000, "B": 7, "P": 90}
        executable = FlashInfer().emit(call.body(), "key", HOPPER, folder)
        assert FlashInfer().workspace(call.body(), executable, folder, sizes, 1) == 4000 * 4 * 64 * 2 + (4000 + 7) * 4


@pytest.mark.usefixtures("on_a_stream")
def test_what_the_library_says_is_the_error(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    call = attention(a_step())
    run = built(call, tmp_path / "out")
    monkeypatch.setattr(library, "current_stream", lambda device: 1)
    with pytest.raises(BackendError, match="attention failed: it is not launched on the current stream"):
        run(*call.tensors)
    moved = torch.empty(call.args[0].numel() + 1, dtype=torch.bfloat16)[1:].view(call.args[0].shape)
    with pytest.raises(InternalError, match="q of a call is at the address"):
        run(moved, *call.tensors[1:])


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "attention.so").write_bytes(b"no library")
    with pytest.raises(BackendError, match="the library does not load"):
        load(SimpleNamespace(files=("attention.so",)), tmp_path, on_one_device("cpu"))  # type: ignore[arg-type]


def test_both_sides_know_one_call() -> None:
    """The fields of `ingot::Call` are those that the loader fills, in the same order and size."""
    text = (KERNELS / "attention.cuh").read_text(encoding="utf-8")
    body = re.search(r"struct Call \{(.*?)\n\};", text, re.DOTALL)
    assert body is not None
    fields = re.findall(r"^  (.+?)(\*| )\s*(\w+);", body[1], re.MULTILINE)
    sizes = {name: 4 if (kind, star) == ("int32_t", " ") else 8 for kind, star, name in fields}
    assert sizes == {name: ctypes.sizeof(kind) for name, kind, *_ in _Call._fields_}
    assert list(sizes) == [name for name, *_ in _Call._fields_]
