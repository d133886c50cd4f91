"""Try tile sizes of the linear kernels on this GPU, and write their times. A tool, not a benchmark with a result file.

    python benchmarks/kernels/tune_linear.py [--out tune_linear.json] [--seconds 120] [--tokens 1,32,8,64]

It times the matmuls of the decoders' layers as a step calls them, with the norm, gate or residual of their regions. A
CUDA graph holds a sequence of launches, and each may begin before the previous one has ended. Their weights are spread
over 3 GB, so that no cache holds any. Bytes are those of the weights. The fraction is of a copy in the same run, reads
plus writes. Kernels are compiled in other processes, ahead of the measurements. At the end whole stacks of layers run,
with a pause in place of attention. Each matmul in turn tries its best sizes and keeps those that are best for the
stack: there, a kernel must also leave room for the next one, which loads its first weights at the same time. The best
are printed, for the tables of lower/linear_tiles.py; linear.py measures the kernels with the sizes of the tables.
"""

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import triton
from linear_products import DECODERS, MACHINE, best_known, for_other_tokens
from linear_stack import KEPT, Stack, sizes

from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.lower.linear.tiles import Tiles
from ingot.backends.triton.tune.device import Pool
from ingot.backends.triton.tune.linear import STEPS, LinearBench, TimedLinear, compile_all
from ingot.backends.triton.tune.linear_candidates import AnyTiles, candidates, more_candidates
from ingot.backends.triton.tune.search import compilers, measure_all, microseconds


@dataclass(frozen=True)
class Found:
    """A measurement of tile sizes for one matmul of a model.

    `decoder` is the name of the model. `part` is the name of the matmul, such as "qkv".
    """

    decoder: str
    part: str
    timed: TimedLinear

    def row(self) -> dict[str, Any]:
        timed = self.timed
        return {
            "decoder": self.decoder,
            "part": self.part,
            **sizes(timed.problem, timed.tiles),
            "microseconds": round(timed.microseconds, 2),
            "gb_per_second": round(timed.problem.bytes / timed.microseconds / 1e3),
            "fraction": round(timed.fraction, 4),
        }


def tune(
    bench: LinearBench, pool: ProcessPoolExecutor, tokens: int, earlier: Sequence[TimedLinear], deadline: float
) -> list[TimedLinear]:
    """Measure tile sizes for the matmuls of all models in DECODERS, in steps of `tokens` tokens, until `deadline`.

    `earlier` are measurements for another number of tokens. If it has a matmul, only the tile sizes that were best
    there are tried. Otherwise all candidates are tried. Then variants of the best ones are tried.
    """
    jobs: list[list[tuple[LinearProblem, AnyTiles]]] = []
    for decoder in DECODERS:
        for part in decoder.parts(tokens).values():
            known = sorted(
                (one for one in earlier if replace(one.problem, tokens=part.tokens) == part), key=microseconds
            )
            kept = [one.tiles for one in known[:KEPT] if isinstance(one.tiles, Tiles)]
            tried = [for_other_tokens(part, tiles) for tiles in kept] or candidates(part, MACHINE)
            jobs.append([(part, tiles) for tiles in dict.fromkeys([best_known(part), *tried])])
    in_turns = [job for turn in zip_longest(*jobs) for job in turn if job is not None]  # the deadline cuts all equally
    now = time.monotonic()
    found = measure_all(bench, pool, compile_all, MACHINE, in_turns, now + 0.75 * (deadline - now))
    best = best_of(found).values()
    more = [(one.problem, tiles) for one in best for tiles in more_candidates(one.problem, one.tiles)]
    return found + measure_all(bench, pool, compile_all, MACHINE, more, deadline)


def best_of(found: Sequence[TimedLinear]) -> dict[LinearProblem, TimedLinear]:
    """Return the fastest measurement of each matmul in `found`."""
    best: dict[LinearProblem, TimedLinear] = {}
    for one in sorted(found, key=microseconds):
        best.setdefault(one.problem, one)
    return best


def named(found: Sequence[TimedLinear]) -> list[Found]:
    """Return the measurements with the names of the model and of the matmul.

    They are sorted by tokens, then by model, then by matmul.
    """
    return [
        Found(decoder.name, part, one)
        for tokens in sorted({STEPS[one.problem.tokens] for one in found})
        for decoder in DECODERS
        for part, problem in decoder.parts(tokens).items()
        for one in found
        if one.problem == problem
    ]


def print_table(best: Sequence[Found]) -> None:
    """Print the fastest tile sizes of each matmul as Python source, to paste into the tables of
    lower/linear_tiles.py."""
    for one in best:
        problem, timed = one.timed.problem, one.timed
        place = f"{STEPS[problem.tokens]:2} tokens, {one.decoder} {one.part}:"
        key = f"Product({problem.columns}, {problem.depth}{', gated=True' if problem.gated else ''})"
        print(f"{place:24}{timed.fraction:5.0%}  {key}: Measured({timed.tiles}, {timed.microseconds:.2f}),")


def _share_of(deadline: float, part: float) -> float:
    """Return a time between now and `deadline`. The fraction `part` of the remaining time will then have passed.

    Times are values of time.monotonic().
    """
    now = time.monotonic()
    return now + part * max(0.0, deadline - now)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tune_linear.json"))
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds after which no more sizes are tried")
    parser.add_argument("--tokens", default="1,32,8,64", help="tokens of a step, by commas; 64 starts from 32")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds - 10.0  # reserve time for the stacks and for writing
    found: list[TimedLinear] = []
    stacks: list[dict[str, Any]] = []
    with compilers() as pool:
        bench = LinearBench(Pool())
        print(f"copy: {bench.pool.copy / 1e9:.0f} GB/s on {torch.cuda.get_device_name()}")
        steps = [int(tokens) for tokens in options.tokens.split(",")]
        for place, tokens in enumerate(steps):
            # Early steps get more than their share of the time left: later ones start from their measurements.
            until = _share_of(deadline, min(1.0, 1.6 / (len(steps) - place)))
            earlier = [one for one in found if one.problem.tokens == 32 and tokens == 64]
            mine = tune(bench, pool, tokens, earlier, _share_of(until, 0.65))
            found += mine
            for index, decoder in enumerate(DECODERS):
                stop = _share_of(until, 1 / (len(DECODERS) - index))
                stacks.append(Stack(bench, decoder, tokens).row(pool, mine, stop))
                print(stacks[-1], flush=True)
        pool.shutdown(cancel_futures=True)
    best = named(list(best_of(found).values()))
    print_table(best)
    document = {
        "device": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "copy_gb_per_second": round(bench.pool.copy / 1e9),
        "stacks": stacks,
        "best": [one.row() for one in best],
        "all": [one.row() for one in named(found)],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
