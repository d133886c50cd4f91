"""Try tile sizes of decode attention on this GPU, and write their times. A tool, not a benchmark with a result file.

    python benchmarks/kernels/tune_attention.py [--out tune_attention.json] [--seconds 90] [--cache-dtype f8e4m3]

It times what `compile-model --tune` times (backends/triton/tune/attention.py), for more problems at once: steps of 1,
16, 32, 64 and 512 tokens with heads of 64 and 128 elements, some with heads of 80, over mixes of contexts. It prints
the best by the same criterion, for the tables of lower/attention/tiles.py, and writes the times of all to --out. Times
of attention with append in steps of up to 64 tokens are what it adds between two matmuls. Other times are of attention
alone. attention.py measures the kernel with the sizes of the tables.
"""

import argparse
import json
import time
from concurrent.futures import wait
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton

from ingot.backends.triton.lower.attention.problem import AUTO, DecodeProblem
from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.backends.triton.tune.attention import MIXES, AttentionBench, best, compile_all
from ingot.backends.triton.tune.attention_candidates import candidates, more_candidates
from ingot.backends.triton.tune.attention_matmuls import compile_matmuls
from ingot.backends.triton.tune.device import Machine, Pool
from ingot.backends.triton.tune.search import compilers, measure_all

MACHINE = Machine(sm=90, cores=132)  # the machine of the table
# The layers of Llama-3.1-8B and Llama-3.2-1B, by their config.json, in pages of 16 positions.
PROBLEMS = [DecodeProblem(8, 4, dim, 16, "bf16", tokens, True) for tokens in (1, 512, 32, 16, 64) for dim in (128, 64)]
# Those of Phi-2, and of GPT-2 of 2.7 B, with keys that are not rotated.
PROBLEMS += [DecodeProblem(32, 1, 80, 16, "bf16", tokens, True) for tokens in (1, 32)]
PROBLEMS += [DecodeProblem(32, 1, 80, 16, "bf16", 1, False)]


def tried(problem: DecodeProblem) -> list[DecodeTiles]:
    found = candidates(problem, MACHINE)
    return list(dict.fromkeys([*found, *more_candidates(problem, found[0])]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tune_attention.json"))
    parser.add_argument("--seconds", type=float, default=90.0, help="seconds after which no more sizes are tried")
    parser.add_argument("--cache-dtype", choices=(AUTO, "f8e4m3", "i8"), default=AUTO)
    options = parser.parse_args()
    problems = [replace(problem, cache_dtype=options.cache_dtype) for problem in PROBLEMS]
    with compilers() as processes:
        wait([processes.submit(compile_matmuls, MACHINE, problem) for problem in problems])
        deadline = time.monotonic() + options.seconds
        pool = Pool()
        print(f"copy {pool.copy / 1e12:.2f} TB/s")
        jobs = [(problem, tiles) for problem in problems for tiles in tried(problem)]
        found = measure_all(AttentionBench(pool), processes, compile_all, MACHINE, jobs, deadline)
        processes.shutdown(cancel_futures=True)
    by_problem = {problem: [one for one in found if one.problem == problem] for problem in problems}
    fastest = {problem: best(mine).tiles for problem, mine in by_problem.items() if mine}
    for problem, tiles in fastest.items():
        print(f"{problem.tokens:3} tokens, heads of {problem.row_bytes} bytes, append={problem.append}: {tiles}")
    document = {
        "device": torch.cuda.get_device_properties(0).name,
        "copy": pool.copy,
        "triton": triton.__version__,
        "mixes": {tokens: [mix.contexts for mix in mixes] for tokens, mixes in MIXES.items()},
        "measured": [{**asdict(one.problem), **asdict(one.tiles), "microseconds": one.times} for one in found],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
