"""Attention of decode steps on this GPU: how near to the memory's bandwidth the kernel comes, by tile sizes.

    python benchmarks/kernels/attention.py [--out attention.json] [--seconds 90]

A step feeds one token of each sequence, through `append_attention`: rotary embedding, cache write and attention. A CUDA
graph holds a row of launches, each of which may begin before the one in front has ended, over sequences that own
different pages of 8 GB, as the layers of a model do. Bytes are those of the cached keys and values. The fraction is of
a copy in the same run, read and write together. FlashInfer's decode (attention alone), where it is installed, runs over
the same pages. Kernels are compiled in other processes, ahead of the measurements.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower.attention_decode import DecodeTiles, schedule_decode
from ingot.backends.triton.lower.attention_problem import DecodeProblem
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import KernelLaunch, Schedule, Value
from ingot.ir.ops import append_attention
from ingot.ir.plan import BucketClass
from ingot.ir.tables import make_table
from ingot.ir.tuning import Choice
from ingot.ir.types import DTYPES, TensorType

DTYPE = torch.bfloat16
PAGE = 16
POOL = 8 << 30  # bytes of pages: two hundred times the last-level cache of an H200
TRAFFIC = 1 << 30  # bytes that a graph reads at least: a quarter of a millisecond, against some microseconds of launch
CORES = 132
POSITIONS = 1 << 17
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class Case:
    """A step: the heads of a layer, and the cached positions of each sequence, the fed token included."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    contexts: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.contexts) * 2 * self.kv_heads * self.dim * DTYPE.itemsize

    @property
    def tokens(self) -> tuple[int, int]:
        """The bucket class that serves it."""
        return next(tokens for tokens in ((1, 1), (2, 16), (17, 32), (33, 64)) if len(self.contexts) <= tokens[1])


# The layers of Llama-3.2-1B and Llama-3.1-8B, by their config.json.
CASES = (
    Case("8b: 1 x 32k", 32, 8, 128, (32768,)),
    Case("8b: 32 x 512", 32, 8, 128, (512,) * 32),
    Case("8b: 1 x 512", 32, 8, 128, (512,)),
    Case("1b: 32 x 512", 32, 8, 64, (512,) * 32),
    Case("1b: 1 x 512", 32, 8, 64, (512,)),
    Case("8b: 8 x 16k", 32, 8, 128, (16384,) * 8),
    Case("8b: 8 x 512", 32, 8, 128, (512,) * 8),
    Case("8b: 32 x 2k", 32, 8, 128, (2048,) * 32),
    Case("8b: 1 x 64k, 31 x 2k", 32, 8, 128, (65536, *(2048,) * 31)),
    Case("1b: 1 x 8k", 32, 8, 64, (8192,)),
)
_MORE = {"combined": 16384, "exact": 1}
ONE = (
    DecodeTiles(64, 5, 2),
    DecodeTiles(64, 5, 2, combined=16384),
    DecodeTiles(64, 5, 2, **_MORE),
    DecodeTiles(64, 5, 2, combined=16384, ahead=2),
    DecodeTiles(64, 5, 2, combined=16384, ahead=4),
    DecodeTiles(64, 5, 2, combined=16384, ahead=3, early=0),
    DecodeTiles(64, 5, 2, combined=16384, ahead=6, early=0),
    DecodeTiles(64, 3, 2, combined=16384, ahead=3, early=0, carried=1),
    DecodeTiles(64, 4, 2, combined=16384, ahead=3, early=0, carried=1),
    DecodeTiles(128, 5, 1, combined=16384),
    DecodeTiles(128, 5, 1, combined=16384, ahead=2),
    DecodeTiles(128, 5, 1, **_MORE, ahead=3, early=0),
    DecodeTiles(128, 5, 1, **_MORE, ahead=3, early=0, warps=8),
    DecodeTiles(64, 5, 3, **_MORE, ahead=3, early=0),
    DecodeTiles(32, 5, 4, combined=16384, ahead=6, early=0),
)
SEVERAL = (
    DecodeTiles(64, 5, 2),
    DecodeTiles(64, 5, 1),
    DecodeTiles(64, 5, 1, ahead=2),
    DecodeTiles(64, 5, 1, ahead=4),
    DecodeTiles(64, 5, 1, ahead=3, early=0),
    DecodeTiles(64, 5, 1, ahead=7, early=0),
    DecodeTiles(64, 5, 2, ahead=3, early=0, combined=16384),
    DecodeTiles(64, 5, 4, ahead=3, early=0, combined=8192),
    DecodeTiles(64, 3, 1, ahead=3, early=0, carried=1),
    DecodeTiles(64, 3, 4, ahead=4, early=0),
    DecodeTiles(32, 5, 1, ahead=8, early=0),
    DecodeTiles(128, 5, 1),
    DecodeTiles(128, 5, 1, ahead=2),
    DecodeTiles(128, 5, 1, ahead=3, early=0, combined=16384),
    DecodeTiles(128, 5, 1, ahead=3, early=0, warps=8),
    DecodeTiles(128, 3, 2, ahead=3, early=0),
)


def tiles_of(case: Case) -> tuple[DecodeTiles, ...]:
    return ONE if case.tokens == (1, 1) else SEVERAL


def make_schedule(case: Case, tiles: DecodeTiles) -> tuple[Schedule, Value]:
    """The kernel of a case for any pages; inputs are the op's tensors in order."""

    def ints(*shape: str) -> TensorType:
        return TensorType(torch.int32, shape)

    heads, kv_heads, dim = case.heads, case.kv_heads, case.dim
    row = (heads + 2 * kv_heads) * dim
    few = TensorType(DTYPE, ("T", kv_heads, dim), (row, dim, 1))
    types = {
        "kv": TensorType(DTYPE, ("pages", 2, PAGE, kv_heads, dim)),
        "q": TensorType(DTYPE, ("T", heads, dim), (row, dim, 1)),
        "k": few,
        "v": few,
        "positions": ints("T"),
        "table": TensorType(torch.float32, (POSITIONS, dim)),
        "slots": TensorType(torch.int64, ("T",)),
        "page_table": ints("B", "P"),
        **{name: ints("B") for name in ("q_starts", "q_lens", "kv_lens")},
    }
    values = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    attributes = {"eps": 1e-5, "scale": dim**-0.5, "interleaved": False}
    schedule = Schedule(90, CORES, BucketClass(name="bench", tokens=case.tokens), dependent=True)
    call = Call("append_attention", values, attributes, (TensorType(DTYPE, ("T", heads, dim)),))
    problem = DecodeProblem(kv_heads, heads // kv_heads, dim, PAGE, "bf16", case.tokens[1], True)
    choice = Choice(kernel="decode_attention", problem=problem.fields(), tiles=asdict(tiles), source="measured")
    schedule.given = {choice.key: choice}
    return schedule, schedule_decode(call, schedule, append=True)[0]


def options_of(launch: KernelLaunch) -> dict[str, Any]:
    return {"num_warps": launch.warps, "num_stages": launch.stages, "launch_pdl": launch.dependent}


def compile_kernel(case: Case, tiles: DecodeTiles) -> None:
    """Fill Triton's cache on disk, without touching the GPU."""
    for launch in make_schedule(case, tiles)[0].launches:
        signature, constants, attributes = {}, dict(launch.constants), {}
        for place, name in enumerate(launch.kernel.arg_names):
            value = launch.arguments.get(name)
            if isinstance(value, Value):
                signature[name] = "*" + TYPES[value.type.dtype]
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif value is None:
                signature[name] = "constexpr"
                constants.setdefault(name, None)
            else:
                signature[name] = "i32"
        source = ASTSource(launch.kernel, signature, constants, attributes)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options_of(launch))


class Step:
    """The inputs of a case over one part of the pool after another, one part for each call."""

    def __init__(self, case: Case, pool: torch.Tensor, g: torch.Generator) -> None:
        self.case = case
        heads, kv_heads, dim = case.heads, case.kv_heads, case.dim
        self.kv = pool.view(-1, 2, PAGE, kv_heads, dim)
        count = len(case.contexts)
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        merged = torch.randn(count, sum(sizes), generator=g, device="cuda").to(DTYPE)
        self.qkv = [part.view(count, -1, dim) for part in merged.split(sizes, 1)]
        self.lens = torch.tensor(case.contexts, dtype=torch.int32, device="cuda")
        self.ones = torch.ones_like(self.lens)
        self.starts = torch.arange(count, dtype=torch.int32, device="cuda")
        attrs = {"rope_type": "default", "positions": POSITIONS, "theta": 5e5, "rotary_dim": dim}
        self.table = make_table({"kind": "rope", **attrs}).cuda()
        self.width = -(-max(case.contexts) // PAGE)
        self.order = torch.randperm(self.kv.shape[0], generator=g, device="cuda").int()
        self.needed = [-(-length // PAGE) for length in case.contexts]
        self.parts = self.kv.shape[0] // sum(self.needed)
        self.given: list[list[torch.Tensor]] = []

    def pages(self, part: int) -> tuple[torch.Tensor, ...]:
        """Page ids of each sequence."""
        total = sum(self.needed)
        begin = part % self.parts * total
        return self.order[begin : begin + total].split(self.needed)

    def inputs(self, part: int) -> list[torch.Tensor]:
        table = torch.zeros(len(self.needed), self.width, dtype=torch.int32, device="cuda")
        for row, own in zip(table, self.pages(part), strict=True):
            row[: len(own)] = own
        places = (self.lens - 1).long()
        slots = table.gather(1, (places // PAGE)[:, None])[:, 0].long() * PAGE + places % PAGE
        return [
            self.kv, *self.qkv, places.int(), self.table, slots, table, self.starts, self.ones, self.lens,
        ]  # fmt: skip


class Kernel:
    """A case's kernel with its buffers."""

    def __init__(self, case: Case, tiles: DecodeTiles) -> None:
        self.schedule, result = make_schedule(case, tiles)
        self.sizes = {"T": len(case.contexts), "B": len(case.contexts)}
        self.buffers = {
            name: torch.zeros([evaluate(size, self.sizes) for size in buffer.shape], dtype=DTYPES[buffer.dtype]).cuda()
            for name, buffer in self.schedule.buffers.items()
        }
        self.output = self.buffers[str(result.buffer)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        sizes = {**self.sizes, "P": inputs[7].shape[1]}
        for launch in self.schedule.launches:
            arguments: dict[str, Any] = {}
            for name, value in launch.arguments.items():
                if isinstance(value, Value):
                    arguments[name] = (
                        inputs[value.input] if value.input is not None else self.buffers[str(value.buffer)]
                    )
                else:
                    arguments[name] = None if value is None else evaluate(value, sizes)
            grid = tuple(evaluate(size, sizes) for size in launch.grid)
            launch.kernel[grid](**arguments, **launch.constants, **options_of(launch))


def seconds(work: Callable[[], object], rounds: int = 8) -> float:
    """The least time of `work`, by events of the device."""
    work()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return min(times)


def graph_seconds(calls: Iterable[Callable[[], object]]) -> float:
    """Seconds of each of the calls in a row, in a CUDA graph."""
    todo = list(calls)
    todo[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in todo:
            call()
    return seconds(graph.replay) / len(todo)


def measure(case: Case, tiles: DecodeTiles, step: Step, expected: torch.Tensor) -> float:
    """Seconds of a launch. Raises RuntimeError where the kernel is wrong."""
    kernel = Kernel(case, tiles)
    for _ in range(2):  # the second finds the counters as the first left them
        kernel.output.fill_(float("nan"))
        kernel(step.inputs(0))
        error = float((kernel.output.float() - expected).norm() / expected.norm())
        if not error < 1e-2:  # bf16 rounds by 2e-3
            raise RuntimeError(f"the result is wrong by {error}")
    count = max(8, min(200, TRAFFIC // case.bytes))
    step.given = step.given or [step.inputs(part) for part in range(count)]
    return graph_seconds(lambda inputs=inputs: kernel(inputs) for inputs in step.given)  # type: ignore[misc]


def flashinfer_seconds(case: Case, step: Step) -> float:
    """Seconds of FlashInfer's decode on tensor cores, over q as it comes and the pages as they are."""
    import flashinfer

    count = max(8, min(32, TRAFFIC // case.bytes))
    q = step.qkv[0].contiguous()
    needed = torch.tensor([0, *step.needed], dtype=torch.int32).cumsum(0).int().cuda()
    last = (step.lens - 1) % PAGE + 1
    wrappers = []
    for part in range(count):
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        pages = torch.cat(step.pages(part))
        shapes = (case.heads, case.kv_heads, case.dim, PAGE)
        wrapper.plan(needed, pages, last, *shapes, q_data_type=DTYPE, kv_data_type=DTYPE)
        wrappers.append(wrapper)
    out = torch.empty_like(q)
    return graph_seconds(lambda wrapper=wrapper: wrapper.run(q, step.kv, out=out) for wrapper in wrappers)  # type: ignore[misc]


def reference(step: Step) -> torch.Tensor:
    """The attention of the first part, and the cache as that leaves it."""
    kv, *rest = step.inputs(0)
    own = torch.cat(step.pages(0)).long()
    # Over a copy of the pages in use, renumbered, so that nothing of the pool moves.
    small, place = kv[own].clone(), torch.full((kv.shape[0],), -1, dtype=torch.int64, device="cuda")
    place[own] = torch.arange(len(own), device="cuda")
    slots, table = rest[5], rest[6]
    rest[5] = place[slots // PAGE] * PAGE + slots % PAGE
    rest[6] = place[table.long()].clamp(min=0).int()
    return append_attention.reference(small, *rest, eps=1e-5, scale=step.case.dim**-0.5)[0].float()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("attention.json"))
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no more is tried")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        compiled: dict[tuple[Case, DecodeTiles], Future[None]] = {
            (case, tiles): pool.submit(compile_kernel, case, tiles)
            for case in one_of_each(CASES)
            for tiles in tiles_of(case)
        }
        g = torch.Generator("cuda").manual_seed(1)
        memory = torch.empty(POOL // DTYPE.itemsize, dtype=DTYPE, device="cuda")
        for begin in range(0, memory.numel(), 1 << 28):
            memory[begin : begin + (1 << 28)].normal_(generator=g)
        half = memory.numel() // 4
        copy = 2 * half * DTYPE.itemsize / seconds(lambda: memory[:half].copy_(memory[half : 2 * half]))
        print(f"copy {copy / 1e12:.2f} TB/s")
        rows = run_cases(memory, g, compiled, copy, deadline)
    properties = torch.cuda.get_device_properties(0)
    found = {"device": properties.name, "copy": copy, "triton": triton.__version__, "measured": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def one_of_each(cases: Iterable[Case]) -> list[Case]:
    """Cases whose kernels differ."""
    return list({(case.heads, case.kv_heads, case.dim, case.tokens): case for case in cases}.values())


def run_cases(
    memory: torch.Tensor,
    g: torch.Generator,
    compiled: dict[tuple[Case, DecodeTiles], "Future[None]"],
    copy: float,
    deadline: float,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def note(case: Case, what: str, found: float, **more: Any) -> None:
        fraction = case.bytes / found / copy
        rows.append({"case": case.name, "what": what, "us": found * 1e6, "of_copy": fraction, **more})
        print(
            f"{case.name:24} {found * 1e6:8.2f} us {case.bytes / found / 1e9:6.0f} GB/s {fraction:6.1%}  {what}",
            flush=True,
        )

    for case in CASES:
        step = Step(case, memory, g)
        expected = reference(step)
        for tiles in tiles_of(case):
            if time.monotonic() > deadline:
                print("out of time")
                return rows
            try:
                for (other, same), future in compiled.items():
                    if same == tiles and other.dim == case.dim and other.tokens == case.tokens:
                        future.result()
                note(case, str(tiles), measure(case, tiles, step, expected), **asdict(tiles))
            except (triton.runtime.errors.TritonError, triton.CompilationError, RuntimeError) as error:
                print(f"{case.name} {tiles}: {error}"[:300])
        if importlib.util.find_spec("flashinfer"):
            note(case, "flashinfer", flashinfer_seconds(case, step))
    return rows


if __name__ == "__main__":
    main()
