"""Attention of decode steps on this GPU: how near to the memory's bandwidth the kernel comes, by tile sizes.

    python benchmarks/kernels/attention.py [--out attention.json] [--seconds 90]

A step feeds one token of each sequence, through `append_attention`: rotary embedding, cache write and attention. It is
timed as `compile-model --tune` times it (backends/triton/tune/attention.py): a CUDA graph holds a row of launches, each
of which may begin before the one in front has ended, over sequences that own different pages of 3 GB, as the layers of
a model do. Bytes are those of the cached keys and values. The fraction is of a copy in the same run, read and write
together. FlashInfer's decode (attention alone), where it is installed, runs over the same pages.
"""

import argparse
import importlib.util
import json
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from ingot.backends.triton.lower.attention_problem import DecodeProblem
from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.tune.attention import Mix, Steps, compile_all, seconds_of
from ingot.backends.triton.tune.device import Machine, Pool, graph_seconds
from ingot.backends.triton.tune.search import compilers

PAGE = 16
MACHINE = Machine(sm=90, cores=132)


@dataclass(frozen=True)
class Case:
    """A step: the heads of a layer, and the cached positions of each sequence, the fed token included."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    contexts: tuple[int, ...]

    @property
    def problem(self) -> DecodeProblem:
        """With the bucket class that serves it."""
        tokens = next(tokens for tokens in (1, 16, 32, 64) if len(self.contexts) <= tokens)
        return DecodeProblem(self.kv_heads, self.heads // self.kv_heads, self.dim, PAGE, "bf16", tokens, True)


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


def tiles_of(problem: DecodeProblem) -> tuple[DecodeTiles, ...]:
    return ONE if problem.tokens == 1 else SEVERAL


def flashinfer_seconds(steps: Steps) -> float:
    """Of FlashInfer's decode on tensor cores, over q as it comes and the pages as they are."""
    import flashinfer

    problem, calls = steps.problem, []
    needed = torch.tensor([0, *steps.needed], dtype=torch.int32).cumsum(0).int().cuda()
    last = (torch.tensor(steps.mix.contexts, dtype=torch.int32).cuda() - 1) % problem.page + 1
    for inputs in steps.inputs[:32]:
        kv, q, page_table = inputs[0], inputs[1].contiguous(), inputs[7]
        pages = torch.cat([row[:count] for row, count in zip(page_table, steps.needed, strict=True)])
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        shapes = (q.shape[1], problem.kv_heads, problem.dim, problem.page)
        wrapper.plan(needed, pages, last, *shapes, q_data_type=q.dtype, kv_data_type=kv.dtype)
        calls.append(partial(wrapper.run, q, kv, out=torch.empty_like(q)))
    calls[0]()
    return graph_seconds(calls) / len(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("attention.json"))
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no more is tried")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    with compilers() as processes:
        kernels = {(case.problem, tiles): None for case in CASES for tiles in tiles_of(case.problem)}
        compiled = {kernel: processes.submit(compile_all, MACHINE, *kernel) for kernel in kernels}
        pool = Pool()
        print(f"copy {pool.copy / 1e12:.2f} TB/s")
        rows = run_cases(pool, compiled, deadline)
        processes.shutdown(cancel_futures=True)
    properties = torch.cuda.get_device_properties(0)
    found = {"device": properties.name, "copy": pool.copy, "triton": triton.__version__, "measured": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def run_cases(
    pool: Pool, compiled: dict[tuple[DecodeProblem, DecodeTiles], "Future[None]"], deadline: float
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def note(case: Case, steps: Steps, what: str, seconds: float, **more: Any) -> None:
        fraction = steps.bytes / seconds / pool.copy
        rows.append({"case": case.name, "what": what, "us": seconds * 1e6, "of_copy": fraction, **more})
        print(f"{case.name:24} {seconds * 1e6:8.2f} us {fraction:6.1%}  {what}", flush=True)

    for case in CASES:
        steps = Steps(case.problem, Mix(case.contexts), pool)
        if importlib.util.find_spec("flashinfer"):
            note(case, steps, "flashinfer", flashinfer_seconds(steps))
        for tiles in tiles_of(case.problem):
            if time.monotonic() > deadline:
                print("out of time")
                return rows
            try:
                compiled[case.problem, tiles].result()
                note(case, steps, str(tiles), seconds_of(MACHINE, tiles, steps), **asdict(tiles))
            except (triton.runtime.errors.TritonError, triton.CompilationError, RuntimeError) as error:
                print(f"{case.name} {tiles}: {error}"[:300])
    return rows


if __name__ == "__main__":
    main()
