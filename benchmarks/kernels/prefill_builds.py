"""Compile kernels for prefill attention as a compile of a model does, in other processes: nvcc takes a
minute for some.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashinfer_peer
import torch

from ingot.backends.flashinfer import load as flashinfer
from ingot.backends.flashinfer.emit import FlashInfer, kernel_for
from ingot.backends.triton import load as triton
from ingot.backends.triton.emit import Triton
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import No
from ingot.ir.machine.target import Target
from ingot.ir.ops import paged_attention
from ingot.ir.program import Program, Stage, StateSpec
from ingot.ir.types import Dim, TensorType
from ingot.passes.call_bodies import call_body
from ingot.runtime.loading.load_context import on_one_device

DTYPE = torch.bfloat16
PAGE = 16
LIMIT = 8192  # tokens of a step
SEQUENCES = 512  # of a step: twice the default
BUCKET = BucketClass(name="extend", tokens=(65, LIMIT))
_EXECUTABLE, _REFUSAL = "executable.json", "refusal.json"
Run = Callable[..., list[torch.Tensor]]


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer.

    `q` is the number of query heads, `kv` the number of key heads, and `dim` the number of elements of a head.
    """

    q: int
    kv: int
    dim: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Heads":
        """Return the attention heads of a model with this config.json."""
        return Heads(config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])


def contenders(sm: int) -> tuple[str, ...]:
    """Return the names of the prefill attention kernels that Ingot can use on a GPU, cheapest estimate first.

    `sm` is the compute capability, such as 90 for 9.0. A compile of a model uses the first kernel whose backend accepts
    the call.
    """
    return ("fa3", "triton", "fa2") if kernel_for(sm, PAGE) == "fa3" else ("triton", "fa2")


def build_all(heads: Heads, sm: int, folder: Path) -> None:
    """Compile all of Ingot's prefill attention kernels for these heads into `folder`.

    If FlashInfer is installed, its kernels are compiled too, into its cache. Kernels that are there already are not
    compiled again. `sm` is the compute capability, such as 90 for 9.0.
    """
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as processes:
        waiting = [processes.submit(emit, heads, contender, folder / contender) for contender in contenders(sm)]
        if flashinfer_peer.installed():
            kernels = (one for one in contenders(sm) if one != "triton")
            waiting += [processes.submit(flashinfer_peer.build, one, heads.dim, DTYPE) for one in kernels]
        for future in waiting:
            future.result()


def load_all(sm: int, folder: Path) -> tuple[dict[str, Run], dict[str, str]]:
    """Load the prefill attention kernels that `build_all` compiled into `folder`.

    Return two dicts by the kernel's name: the loaded kernels, and the reasons why other kernels were not compiled. `sm`
    is the compute capability, such as 90 for 9.0.
    """
    runs, refusals = {}, {}
    for contender in contenders(sm):
        own = folder / contender
        if (own / _REFUSAL).exists():
            refusals[contender] = json.loads((own / _REFUSAL).read_text(encoding="utf-8"))
            continue
        executable = Executable.model_validate_json((own / _EXECUTABLE).read_text(encoding="utf-8"))
        runs[contender] = (triton.load if contender == "triton" else flashinfer.load)(
            executable, own, on_one_device("cuda")
        )
    return runs, refusals


def emit(heads: Heads, contender: str, folder: Path) -> None:
    """Compile the kernel `contender` for these heads into `folder`, as a compile of a model does.

    If its backend refuses the call, the reason is written into the folder instead.
    """
    if (folder / _EXECUTABLE).exists() or (folder / _REFUSAL).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    body, target = body_of(heads), Target.detect("cuda")
    made = Triton() if contender == "triton" else FlashInfer(contender)
    claim = made.claim([next(iter(body.calls()))], target, BUCKET)
    if isinstance(claim, No):
        (folder / _REFUSAL).write_text(json.dumps(claim.reason), encoding="utf-8")
        return
    executable = made.emit(body, folder.name, target, folder)
    (folder / _EXECUTABLE).write_text(executable.model_dump_json(), encoding="utf-8")


def body_of(heads: Heads) -> Program:
    """Return a program (a graph of Ingot ops) with one call of `paged_attention` for these heads."""
    dims = {name: Dim(name, 1, SEQUENCES if name == "B" else LIMIT) for name in "TBP"}
    program = Program("main", Stage.LOWERED, dims, bucket=BUCKET)
    ints = TensorType(torch.int32, ("B",))
    kv_type = TensorType(DTYPE, ("pages", 2, PAGE, heads.kv, heads.dim))
    q = program.add_input("q", TensorType(DTYPE, ("T", heads.q, heads.dim)))
    kv = program.add_state("kv", StateSpec("paged_kv", "full", "token", kv_type))
    table = program.add_input("page_table", TensorType(torch.int32, ("B", "P")))
    lens = [program.add_input(name, ints) for name in ("q_starts", "q_lens", "kv_lens")]
    options = {"scale": heads.dim**-0.5}
    node = build.call(program, paged_attention.overload, [q, kv, table, *lens], options)
    return call_body(program, node, "call")
