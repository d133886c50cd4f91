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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from ingot.backends.triton.lower.attention_problem import DecodeProblem
from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.tune.attention import MIXES, Bench, Mix, Steps, best, compile_all, seconds_of
from ingot.backends.triton.tune.attention_candidates import candidates, more_candidates
from ingot.backends.triton.tune.device import Machine, Pool, graph_seconds
from ingot.backends.triton.tune.search import compilers, measure_all

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
    Case("8b: 8 x 16k", 32, 8, 128, (16384,) * 8),
    Case("8b: 1 x 64k, 31 x 2k", 32, 8, 128, (65536, *(2048,) * 31)),
    Case("8b: 32 x 512", 32, 8, 128, (512,) * 32),
    Case("8b: 32 x 2k", 32, 8, 128, (2048,) * 32),
    Case("8b: 1 x 512", 32, 8, 128, (512,)),
    Case("1b: 1 x 512", 32, 8, 64, (512,)),
    Case("1b: 32 x 512", 32, 8, 64, (512,) * 32),
)
PROBLEMS = [DecodeProblem(8, 4, dim, PAGE, "bf16", tokens, True) for tokens in (1, 32, 16, 64) for dim in (128, 64)]


def tried(problem: DecodeProblem) -> list[DecodeTiles]:
    found = candidates(problem, MACHINE)
    return list(dict.fromkeys([*found, *more_candidates(problem, found[0])]))


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
    deadline = time.monotonic() + options.seconds - 15.0  # for the cases
    with compilers() as processes:
        pool = Pool()
        print(f"copy {pool.copy / 1e12:.2f} TB/s")
        jobs = [(problem, tiles) for problem in PROBLEMS for tiles in tried(problem)]
        found = measure_all(Bench(pool), processes, compile_all, MACHINE, jobs, deadline)
        processes.shutdown(cancel_futures=True)
    by_problem = {problem: [one for one in found if one.problem == problem] for problem in PROBLEMS}
    fastest = {problem: best(mine).tiles for problem, mine in by_problem.items() if mine}
    for problem, tiles in fastest.items():
        print(f"{problem.tokens:2} tokens, heads of {problem.row_bytes} bytes: {tiles}")
    document = {
        "device": torch.cuda.get_device_properties(0).name,
        "copy": pool.copy,
        "triton": triton.__version__,
        "mixes": {tokens: [mix.contexts for mix in mixes] for tokens, mixes in MIXES.items()},
        "measured": [{**asdict(one.problem), **asdict(one.tiles), "microseconds": one.times} for one in found],
        "cases": run_cases(pool, fastest),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


def run_cases(pool: Pool, fastest: Mapping[DecodeProblem, DecodeTiles]) -> list[dict[str, Any]]:
    """Named steps with the best tiles, and with FlashInfer."""
    rows: list[dict[str, Any]] = []

    def note(case: Case, steps: Steps, what: str, seconds: float) -> None:
        fraction = steps.bytes / seconds / pool.copy
        rows.append({"case": case.name, "what": what, "us": round(seconds * 1e6, 2), "of_copy": round(fraction, 4)})
        print(f"{case.name:24} {seconds * 1e6:8.2f} us {fraction:6.1%}  {what}", flush=True)

    for case in CASES:
        steps = Steps(case.problem, Mix(case.contexts), pool)
        if importlib.util.find_spec("flashinfer"):
            note(case, steps, "flashinfer", flashinfer_seconds(steps))
        if tiles := fastest.get(case.problem):
            note(case, steps, str(tiles), seconds_of(MACHINE, tiles, steps))
    return rows


if __name__ == "__main__":
    main()
