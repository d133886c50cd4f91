"""Attention of steps of many tokens on this GPU: our kernel beside FlashInfer's, where it is installed.

    python benchmarks/kernels/prefill.py [--out prefill.json] [--seconds 60]

A step feeds chunks of prompts, and perhaps a token of other sequences beside them, through `paged_attention`, over
pages in a random order. Every call is compiled as a model's is, in other processes, and compared with the reference
first. The operations are those of the pairs that a query sees: a product with its keys and one with its values.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.backends.flashinfer import load as flashinfer
from ingot.backends.flashinfer.emit import FlashInfer
from ingot.backends.triton import load as triton
from ingot.backends.triton.emit import Triton
from ingot.ir import build
from ingot.ir.backend import No
from ingot.ir.ops import paged_attention
from ingot.ir.plan import BucketClass, Executable
from ingot.ir.program import Program, Stage, StateSpec
from ingot.ir.target import Target
from ingot.ir.types import Dim, TensorType
from ingot.passes.call_bodies import call_body

DTYPE = torch.bfloat16
PAGE = 16
LIMIT = 8192
SEQUENCES = 512
BUCKET = BucketClass(name="extend", tokens=(65, LIMIT))
PROVIDERS: dict[str, Callable[[], Triton | FlashInfer]] = {
    "triton": Triton,
    "fa2": lambda: FlashInfer("fa2"),
    "fa3": lambda: FlashInfer("fa3"),
}


@dataclass(frozen=True)
class Heads:
    """The heads of a layer."""

    q: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Case:
    """A step: (tokens fed, positions cached before) of each sequence."""

    name: str
    heads: Heads
    sequences: tuple[tuple[int, int], ...]

    @property
    def flops(self) -> int:
        pairs = sum(fed * before + fed * (fed + 1) // 2 for fed, before in self.sequences)
        return 4 * pairs * self.heads.q * self.heads.dim


# The layers of Llama-3.2-1B and Llama-3.1-8B, by their config.json.
MODELS = {"1b": Heads(32, 8, 64), "8b": Heads(32, 8, 128)}
STEPS = {
    "1 x 128": ((128, 0),),
    "128 after 2000": ((128, 2000),),
    "1 x 1000": ((1000, 0),),
    "1 x 4000": ((4000, 0),),
    "1 x 8192": ((8192, 0),),
    "2048 after 30000": ((2048, 30000),),
    "8 x 1000": ((1000, 0),) * 8,
    "2048, 32 decode after 2000": ((2048, 0), *((1, 2000),) * 32),
    "4 x 448, 256 decode after 600": (*((448, 0),) * 4, *((1, 600),) * 256),
}
CASES = tuple(
    Case(f"{model}: {name}", heads, steps) for model, heads in MODELS.items() for name, steps in STEPS.items()
)


def emit(heads: Heads, provider: str, folder: Path) -> Executable | str:
    """Compile the call for these heads, as the driver does; or why there is none."""
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
    body, target, made = call_body(program, node, "call"), Target.detect("cuda"), PROVIDERS[provider]()
    claim = made.claim([next(iter(body.calls()))], target, BUCKET)
    if isinstance(claim, No):
        return claim.reason
    folder.mkdir()
    return made.emit(body, folder.name, target, folder)


class Step:
    """The tensors of a case."""

    def __init__(self, case: Case) -> None:
        g = torch.Generator("cuda").manual_seed(1)
        heads, needed = case.heads, [-(-(fed + before) // PAGE) for fed, before in case.sequences]

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, device="cuda", dtype=DTYPE)

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        fed = [count for count, _ in case.sequences]
        self.q, self.kv = randn(sum(fed), heads.q, heads.dim), randn(sum(needed), 2, PAGE, heads.kv, heads.dim)
        order = torch.randperm(sum(needed), generator=g, device="cuda").int()
        self.table = torch.zeros(len(fed), max(needed), dtype=torch.int32, device="cuda")
        for row, own in zip(self.table, order.split(needed), strict=True):
            row[: len(own)] = own
        self.lens = ints([sum(fed[:b]) for b in range(len(fed))]), ints(fed), ints([sum(one) for one in case.sequences])

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.kv, self.table, *self.lens

    def error(self, found: torch.Tensor, scale: float) -> float:
        """How far a result is from the reference, in parts of it, over the last 256 tokens of each sequence."""
        places = [
            place
            for start, count in zip(self.lens[0].tolist(), self.lens[1].tolist(), strict=True)
            for place in range(start + max(0, count - 256), start + count)
        ]
        count = self.lens[1].clamp(max=256)
        starts = (count.cumsum(0) - count).int()
        args = (self.q[places].float(), self.kv.float(), self.table, starts, count, self.lens[2])
        expected = paged_attention.reference(*args, scale=scale)
        return float((found[places].float() - expected).norm() / expected.norm())


def seconds(work: Callable[[], object], least: float = 0.02, rows: int = 12) -> float:
    """Seconds of one call among many in a row: the least of some rows of at least so many seconds, since others may
    use the GPU in between."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def row(count: int) -> float:
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / count

    count = max(3, int(least / row(3)))
    return min(row(count) for _ in range(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("prefill.json"))
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no case is begun")
    options = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool,
    ):
        begin = time.monotonic()
        wanted = [(model, provider) for provider in reversed(PROVIDERS) for model in MODELS]  # the longest first
        made = {
            (model, provider): pool.submit(emit, MODELS[model], provider, Path(folder, f"{model}-{provider}"))
            for model, provider in wanted
        }
        runs = {}
        for (model, provider), future in made.items():
            executable = future.result()
            if isinstance(executable, str):
                print(f"{model} {provider}: {executable}")
                continue
            load = triton.load if provider == "triton" else flashinfer.load
            runs[model, provider] = load(executable, Path(folder, executable.id))
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        deadline = time.monotonic() + options.seconds
        for case in CASES:
            if time.monotonic() > deadline:
                break
            step = Step(case)
            for provider in PROVIDERS:
                run = runs.get((case.name.partition(":")[0], provider))
                if run is None:
                    continue
                error = step.error(run(*step.inputs)[0], case.heads.dim**-0.5)
                found = seconds(lambda run=run, step=step: run(*step.inputs))
                rows.append(
                    {
                        "case": case.name,
                        "what": provider,
                        "us": found * 1e6,
                        "flops": case.flops / found,
                        "error": error,
                    }
                )
                print(
                    f"{case.name:32} {provider:8} {found * 1e6:10.1f} us {case.flops / found / 1e12:6.0f} TFLOP/s"
                    f"  error {error:.1e}",
                    flush=True,
                )
    document = {"device": torch.cuda.get_device_properties(0).name, "measured": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
