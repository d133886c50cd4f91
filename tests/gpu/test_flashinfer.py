"""FlashInfer's attention as it is served: built by nvcc, loaded by itself, against the reference in float64."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import disagreement
from call_oracle import difference, same_bits
from gpu_model import MODEL
from one_call import TARGET, OneCall, moved
from paged_steps import Heads, paged_step
from serve_artifact import teacher_forced_artifact
from tiny_checkpoint import Tiny

from ingot import compile_model
from ingot.backends.flashinfer.emit import FlashInfer, kernel_for
from ingot.backends.flashinfer.load import load
from ingot.backends.flashinfer.packages import Missing, find_packages
from ingot.ir.artifact.plan import Executable
from ingot.ir.artifact.tuning import TuningLog
from ingot.ir.backend import No
from ingot.ir.ops import OPS
from ingot.runtime.loading.load_context import on_one_device

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("flashinfer")]
# (tokens fed, positions cached before) of each sequence.
MIXES = (
    [(300, 0)],
    [(140, 1000)],
    [(1, 50), (97, 0), (0, 9), (33, 700), (1, 0), (5, 16)],
    [(1, 20 + 7 * place) for place in range(70)],
    [(150, 9), *((1 + place % 9, 3 * place % 50) for place in range(290)), (40, 200)],  # more than list one tile each
)


@dataclass(frozen=True)
class Kind:
    """What a library is built for."""

    heads: Heads
    dtype: torch.dtype = torch.bfloat16
    page: int = 16
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def call(self, number: int, *, runs: bool = False) -> OneCall:
        """Of the mix with this number; every second one has tokens and sequences of padding. With `runs` the pages of a
        sequence lie behind each other."""
        g = torch.Generator().manual_seed(number)
        padding = {"gap": 3, "behind": 2} if number % 2 else {}
        step = paged_step(g, self.dtype, self.heads, MIXES[number], page=self.page, runs=runs, **padding)
        kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
        return OneCall("paged_attention", (step.q, kv, *step.lens), {"scale": self.heads.dim**-0.5, **self.options})


KINDS = (
    Kind(Heads(8, 2, 128)),
    Kind(Heads(6, 2, 64), torch.float16, page=24, options={"mask": "window_45"}),
    Kind(Heads(4, 4, 128), page=13),  # which FlashAttention-3 does not load
    Kind(Heads(2, 2, 64), options={"soft_cap": 2.0}),  # its tanh is an approximation of 11 bits
    Kind(Heads(2, 1, 256), page=32),
)
KERNELS = ("fa2", "fa3")


def emit(kernel: str, number: int, folder: Path) -> Executable:
    """Claim and build as the driver does."""
    backend, body = FlashInfer(kernel), KINDS[number].call(0).body()
    assert body.bucket is not None
    claim = backend.claim([next(iter(body.calls()))], TARGET, body.bucket)
    assert not isinstance(claim, No), claim.reason
    own = folder / f"{kernel}-{number}"
    own.mkdir()
    return backend.emit(body, own.name, TARGET, own)


Build = Callable[[str, int], Callable[..., list[torch.Tensor]]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Gives the callable of a kernel and a kind. All are built side by side; FlashAttention-3 takes nvcc a minute."""
    if isinstance(found := find_packages(), Missing):
        pytest.skip(found.reason)
    folder = tmp_path_factory.mktemp("flashinfer")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each waits for nvcc
        assert TARGET.sm is not None
        todo = [
            (kernel, number)
            for kernel in reversed(KERNELS)
            for number, kind in enumerate(KINDS)
            if kernel in ("fa2", kernel_for(TARGET.sm, kind.page))
        ]
        made = {one: pool.submit(emit, *one, folder) for one in todo}

        def loaded(kernel: str, number: int) -> Callable[..., list[torch.Tensor]]:
            if (kernel, number) not in made:
                pytest.skip("not for this GPU, or for pages of this size")
            executable = made[kernel, number].result()
            return load(executable, folder / executable.id, on_one_device("cuda"))

        yield loaded


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_against_the_reference(kernel: str, kind: int, built: Build) -> None:
    run = built(kernel, kind)
    for number, runs in itertools.product(range(len(MIXES)), (False, True)):
        call = KINDS[kind].call(number, runs=runs)
        given = [moved(tensor, "cuda") for tensor in call.tensors]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = []
            for _ in range(2):
                poison = torch.full(call.args[0].shape, float("nan"), dtype=call.args[0].dtype, device="cuda")
                del poison  # the call allocates where that was
                found.append(run(*given)[0].cpu())
        problem = difference(call, found[:1])
        assert problem is None, f"mix {number}, {runs=}: {problem}"
        assert same_bits(*found), f"mix {number}, {runs=}: other bits the second time"
        unchanged = [same_bits(one.cpu(), host) for one, host in zip(given, call.tensors, strict=True)]
        assert all(unchanged), "an argument was changed"


def test_a_graph_holds_a_call(built: Build) -> None:
    """Lengths are read on the device: a graph serves other lengths."""
    assert TARGET.sm is not None
    run = built(kernel_for(TARGET.sm, KINDS[0].page), 0)
    call = KINDS[0].call(2)
    given = [moved(tensor, "cuda") for tensor in call.tensors]
    run(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = run(*given)
    *_, q_lens, kv_lens = given
    whole, before = q_lens.clone(), kv_lens - q_lens
    for most in (97, 20, 1):
        q_lens.copy_(whole.clamp(max=most))
        kv_lens.copy_(before + q_lens)
        graph.replay()
        problem = difference(OneCall(call.op, tuple(one.cpu() for one in given), call.kwargs), [out.cpu()])
        assert problem is None, f"{most} tokens of a sequence at most: {problem}"


def test_a_model_is_served_by_it(tmp_path: Path) -> None:
    """Logits of whole prompts, and of long chunks of them, are as near to float32 as the reference's."""
    if isinstance(found := find_packages(), Missing):
        pytest.skip(found.reason)
    config = {**MODEL.config, "head_dim": 64, "torch_dtype": "bfloat16"}
    checkpoint = Tiny("qwen3-heads-of-64", config, seed=5).write(tmp_path / "checkpoint")
    limits: dict[str, Any] = {"max_batch": 4, "max_tokens": 512, "max_seq_len": 256}
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 512, (length,), generator=draw).tolist() for length in (200, 102, 151)]
    expected = []
    for dtype in ("float32", "bfloat16"):
        compile_model(checkpoint, tmp_path / dtype, target="cpu", backend="reference", dtype=dtype, jobs=1, **limits)
        expected.append(torch.cat(teacher_forced_artifact(str(tmp_path / dtype), prompts, None)))
    # A log without times has the claims decide: in a model this small another backend may be faster.
    untimed = TuningLog(target=TARGET.name, cores=TARGET.cores, choices=()).model_dump(mode="json")
    report = compile_model(
        checkpoint, tmp_path / "served", target="cuda", dtype="bfloat16", tuning_log=untimed, **limits
    )
    (plan,) = report.plans.plans.values()
    backends = {
        (bucket.bucket.name, one.backend)
        for bucket in plan.buckets
        for one in bucket.instructions
        if one.target in ("ingot.paged_attention", "ingot.append_attention")
    }
    assert ("extend", "flashinfer") in backends and ("decode-1", "triton") in backends, backends
    for chunk in (None, 100, 40):  # the second step of 100 feeds 100, 2 and 51
        logits = torch.cat(teacher_forced_artifact(str(tmp_path / "served"), prompts, chunk))
        problem = disagreement(logits, *expected, torch.bfloat16)
        assert problem is None, f"in chunks of {chunk}: {problem}"
    assert "flashinfer" not in sys.modules
