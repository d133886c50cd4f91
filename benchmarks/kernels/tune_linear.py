"""Tile sizes of the kernels of linear, tried on this GPU: how near to the memory's bandwidth each comes.

    python benchmarks/kernels/tune_linear.py [--out tune_linear.json] [--seconds 120] [--tokens 1,32,8,64]

Times the products of three decoders' layers as a step calls them, with the norm, gate or residual that a region has
around them. A CUDA graph holds a row of launches, each of which may begin before the one in front has ended, over
weights that lie far apart in 3 GB, so that no cache holds any. Bytes are those of the weights. The fraction is of a
copy in the same run, read and write together. Kernels are compiled in other processes, ahead of the measurements. At
the end whole stacks of layers run, with a pause in place of attention, and each product in turn takes those of its best
sizes that serve the stack best: there a kernel also has to leave room for the next one, which loads its first weights
meanwhile.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ingot.backends.triton.lower.linear import padded_tokens
from ingot.backends.triton.lower.linear_choice import known_tiles
from ingot.backends.triton.lower.linear_problem import LinearProblem
from ingot.backends.triton.lower.linear_tiles import MatvecTiles, Tiles
from ingot.backends.triton.tune import (
    STEPS,
    Bench,
    Call,
    Machine,
    TilesOf,
    Timed,
    candidates,
    compile_all,
    compilers,
    measure_all,
    microseconds,
    more_candidates,
    stages_that_fit,
)

MACHINE = Machine(sm=90, cores=132)
PAUSE = 4000  # nanoseconds
_KEPT = 8  # of the best tiles for one number of tokens are tried for another


@dataclass(frozen=True)
class Decoder:
    """The shapes of a decoder's step."""

    name: str
    layers: int
    hidden: int
    qkv: int
    heads: int  # all of them together
    ffn: int
    vocab: int

    def parts(self, tokens: int) -> dict[str, LinearProblem]:
        """The products of a layer and of the head, in a step of so many tokens, by name."""

        def part(columns: int, depth: int, result: str = "bf16", **around: bool) -> LinearProblem:
            return LinearProblem(columns, depth, padded_tokens(tokens), "bf16", result, **around)

        return {
            "qkv": part(self.qkv, self.hidden, norm=True),
            "o": part(self.hidden, self.heads, residual=True),
            "gate_up": part(self.ffn, self.hidden, gated=True, norm=True),
            "down": part(self.hidden, self.ffn, residual=True),
            "head": part(self.vocab, self.hidden, "f32", norm=True),
        }


# Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B, by their config.json.
DECODERS = (
    Decoder("8b", 32, 4096, 6144, 4096, 14336, 128256),
    Decoder("1b", 16, 2048, 3072, 2048, 8192, 128256),
    Decoder("0.6b", 28, 1024, 4096, 2048, 3072, 151936),
)


@dataclass(frozen=True)
class Found:
    """A measurement, and whose product it is of."""

    decoder: str
    part: str
    timed: Timed

    def row(self) -> dict[str, Any]:
        timed = self.timed
        return {
            "decoder": self.decoder,
            "part": self.part,
            **_sizes(timed.problem, timed.tiles),
            "microseconds": round(timed.microseconds, 2),
            "gb_per_second": round(timed.problem.bytes / timed.microseconds / 1e3),
            "fraction": round(timed.fraction, 4),
        }


def _sizes(problem: LinearProblem, tiles: TilesOf) -> dict[str, Any]:
    shape = {"columns": problem.columns, "depth": problem.depth, "gated": problem.gated}
    return {**shape, "tokens": STEPS[problem.tokens], **asdict(tiles)}


def for_other_tokens(problem: LinearProblem, tiles: Tiles) -> Tiles:
    """The same tiles with as many stages as fit with more tokens."""
    most = stages_that_fit(problem, tiles.block_n, tiles.block_k, tiles.splits, 1)
    return replace(tiles, stages=min(tiles.stages, most))


def tune(
    bench: Bench, pool: ProcessPoolExecutor, tokens: int, earlier: Sequence[Timed], deadline: float
) -> list[Timed]:
    """Measurements of all parts for steps of `tokens`: of all candidates, or, where there are `earlier` ones for
    another number of tokens, of those that did best there."""
    jobs: list[list[tuple[LinearProblem, TilesOf]]] = []
    for decoder in DECODERS:
        for part in decoder.parts(tokens).values():
            known = sorted(
                (one for one in earlier if replace(one.problem, tokens=part.tokens) == part), key=microseconds
            )
            kept = [one.tiles for one in known[:_KEPT] if isinstance(one.tiles, Tiles)]
            tried = [for_other_tokens(part, tiles) for tiles in kept] or candidates(part, MACHINE)
            jobs.append([(part, tiles) for tiles in dict.fromkeys([best_known(part), *tried])])
    in_turns = [job for turn in zip_longest(*jobs) for job in turn if job is not None]  # the deadline hits all alike
    now = time.monotonic()
    found = measure_all(bench, pool, MACHINE, in_turns, now + 0.75 * (deadline - now))
    best = best_of(found).values()
    more = [(one.problem, tiles) for one in best for tiles in more_candidates(one.problem, one.tiles)]
    return found + measure_all(bench, pool, MACHINE, more, deadline)


def best_known(problem: LinearProblem) -> TilesOf:
    """What the lowering takes by itself."""
    return known_tiles(problem.product(), problem.tokens, MACHINE.sm)[0]


def best_of(found: Sequence[Timed]) -> dict[LinearProblem, Timed]:
    """The fastest for each product and number of tokens."""
    best: dict[LinearProblem, Timed] = {}
    for one in sorted(found, key=microseconds):
        best.setdefault(one.problem, one)
    return best


def named(found: Sequence[Timed]) -> list[Found]:
    """The measurements by the decoders' parts, in their order."""
    return [
        Found(decoder.name, part, one)
        for tokens in sorted({STEPS[one.problem.tokens] for one in found})
        for decoder in DECODERS
        for part, problem in decoder.parts(tokens).items()
        for one in found
        if one.problem == problem
    ]


class Stack:
    """All products of a decoder's step in a row, with a pause where attention runs."""

    def __init__(self, bench: Bench, decoder: Decoder, tokens: int) -> None:
        self.bench, self.decoder, self.tokens = bench, decoder, tokens
        self.parts = decoder.parts(tokens)
        self.calls: dict[tuple[LinearProblem, TilesOf], Call] = {}

    def seconds(self, chosen: Mapping[str, TilesOf]) -> float:
        """Raises what Triton raises for tiles that do not fit."""
        for part, problem in self.parts.items():
            if (problem, chosen[part]) not in self.calls:  # made, and loaded, outside of the recording
                call = self.calls[problem, chosen[part]] = Call(MACHINE, problem, chosen[part])
                call(self.bench.inputs(problem))
        return self.bench.graph_seconds(self._launches(chosen))

    def _launches(self, chosen: Mapping[str, TilesOf]) -> Iterator[Callable[[], None]]:
        for part in self._order():
            problem = self.parts[part]
            yield partial(self.calls[problem, chosen[part]], self.bench.inputs(problem))
            if part == "qkv":
                yield pause

    def _order(self) -> Iterator[str]:
        *layer, head = self.parts
        return iter((*layer * self.decoder.layers, head))

    def refine(
        self, pool: ProcessPoolExecutor, found: Sequence[Timed], deadline: float
    ) -> tuple[dict[str, TilesOf], float, float]:
        """The best sizes for the stack, what it takes with the best for each product by itself, and with these."""
        tried = {part: self._tried(problem, found) for part, problem in self.parts.items()}
        jobs = [(problem, tiles) for part, problem in self.parts.items() for tiles in tried[part]]
        wait([pool.submit(compile_all, MACHINE, problem, tiles) for problem, tiles in jobs])
        best = {part: tried[part][0] for part in self.parts}
        first = least = self.seconds(best)
        for part in (*self.parts, *self.parts):
            for tiles in tried[part]:
                if tiles == best[part] or time.monotonic() > deadline:
                    continue
                try:
                    seconds = self.seconds({**best, part: tiles})
                except triton.runtime.errors.OutOfResources:
                    continue
                if seconds < least:
                    best, least = {**best, part: tiles}, seconds
        return best, first, least

    def _tried(self, problem: LinearProblem, found: Sequence[Timed]) -> list[TilesOf]:
        """The fastest by themselves, first of all the very fastest; some with weights fetched ahead; the known."""
        fastest = [one.tiles for one in sorted(found, key=microseconds) if one.problem == problem][:_KEPT]
        ahead: list[TilesOf] = [replace(one, lines=lines) for one in fastest[:3] for lines in (0, 16)]
        for one in fastest[:4]:
            if isinstance(one, MatvecTiles):
                waves = problem.columns // (one.block_n * 2 * MACHINE.cores)  # that follow the first
                ahead += [replace(one, ahead=later) for later in (1, 2, 4, 8) if later < waves]
        return list(dict.fromkeys([*fastest, *ahead, best_known(problem)]))

    def row(self, pool: ProcessPoolExecutor, found: Sequence[Timed], deadline: float) -> dict[str, Any]:
        best, first, least = self.refine(pool, found, deadline)
        moved = sum(self.parts[part].bytes for part in self._order())
        return {
            "decoder": self.decoder.name,
            "tokens": self.tokens,
            "microseconds_by_itself": round(first * 1e6, 1),
            "microseconds": round(least * 1e6, 1),
            "fraction": round(moved / least / self.bench.copy, 4),
            "pauses": round(PAUSE * 1e-3 * self.decoder.layers, 1),
            "best": [{"part": part, **_sizes(self.parts[part], tiles)} for part, tiles in best.items()],
        }


@triton.jit
def _pause(nanoseconds: tl.constexpr):
    gdc_launch_dependents()
    gdc_wait()
    begin = globaltimer()
    while globaltimer() - begin < nanoseconds:
        pass


def pause() -> None:
    """Attention over a short context: as long, on as many multiprocessors, and with no weights to read."""
    _pause[(MACHINE.cores,)](PAUSE, num_warps=4, launch_pdl=True)


def print_table(best: Sequence[Found]) -> None:
    print(f"{'tokens':>6} {'decoder':8}{'part':8} {'µs':>8} {'GB/s':>6} {'of copy':>8}  tiles")
    for one in best:
        row = one.row()
        print(
            f"{row['tokens']:6} {one.decoder:8}{one.part:8} {row['microseconds']:8.1f} {row['gb_per_second']:6}"
            f" {row['fraction']:8.1%}  {one.timed.tiles}"
        )


def _share_of(deadline: float, part: float) -> float:
    """When `part` of the time until the deadline is over."""
    now = time.monotonic()
    return now + part * max(0.0, deadline - now)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tune_linear.json"))
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no more is tried")
    parser.add_argument("--tokens", default="1,32,8,64", help="of a step, separated by commas; 64 follows 32")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds - 10.0  # for the stacks, and to write
    found: list[Timed] = []
    stacks: list[dict[str, Any]] = []
    with compilers() as pool:
        bench = Bench()
        print(f"copy: {bench.copy / 1e9:.0f} GB/s on {torch.cuda.get_device_name()}")
        steps = [int(tokens) for tokens in options.tokens.split(",")]
        for place, tokens in enumerate(steps):
            # Of the time that is left, more than the last ones get: those begin from the measurements of the first.
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
        "copy_gb_per_second": round(bench.copy / 1e9),
        "stacks": stacks,
        "best": [one.row() for one in best],
        "all": [one.row() for one in named(found)],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
