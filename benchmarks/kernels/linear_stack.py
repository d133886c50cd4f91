"""Choose tile sizes by running all matmuls of a decoder's step in sequence. There, a kernel must also leave room for
the next one.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import triton
import triton.language as tl
from linear_products import MACHINE, Decoder, best_known
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.lower.linear.tiles import MatvecTiles
from ingot.backends.triton.tune.device import Launcher, graph_seconds
from ingot.backends.triton.tune.linear import STEPS, LinearBench, TimedLinear, compile_all, launcher
from ingot.backends.triton.tune.linear_candidates import AnyTiles
from ingot.backends.triton.tune.search import microseconds

KEPT = 8  # best tiles per matmul that are tried in a stack, or for another number of tokens
PAUSE = 4000  # nanoseconds


@triton.jit
def _pause(nanoseconds: tl.constexpr):
    gdc_launch_dependents()
    gdc_wait()
    begin = globaltimer()
    while globaltimer() - begin < nanoseconds:
        pass


def pause() -> None:
    """Make all multiprocessors of the GPU wait for PAUSE nanoseconds, without reading memory.

    The pause takes the place of attention over a short context.
    """
    _pause[(MACHINE.cores,)](PAUSE, num_warps=4, launch_pdl=True)


class Stack:
    """All matmuls of a model's step, one after another in a CUDA graph. A pause takes the place of attention."""

    def __init__(self, bench: LinearBench, decoder: Decoder, tokens: int) -> None:
        self.bench, self.decoder, self.tokens = bench, decoder, tokens
        self.parts = decoder.parts(tokens)
        self.calls: dict[tuple[LinearProblem, AnyTiles], Launcher] = {}

    def seconds(self, chosen: Mapping[str, AnyTiles]) -> float:
        """Return the seconds that all matmuls of a step take together.

        `chosen` maps names of matmuls, such as "qkv", to tile sizes. Raises Triton's error for tiles that do not fit.
        """
        for part, problem in self.parts.items():
            if (problem, chosen[part]) not in self.calls:  # make and load it outside the recording
                call = self.calls[problem, chosen[part]] = launcher(MACHINE, problem, chosen[part])
                call(self.bench.inputs(problem))
        return graph_seconds(self._launches(chosen))

    def _launches(self, chosen: Mapping[str, AnyTiles]) -> Iterator[Callable[[], None]]:
        for part in self._order():
            problem = self.parts[part]
            yield partial(self.calls[problem, chosen[part]], self.bench.inputs(problem))
            if part == "qkv":
                yield pause

    def _order(self) -> Iterator[str]:
        *layer, head = self.parts
        return iter((*layer * self.decoder.layers, head))

    def refine(
        self, pool: ProcessPoolExecutor, found: Sequence[TimedLinear], deadline: float
    ) -> tuple[dict[str, AnyTiles], float, float]:
        """Search the tile sizes with which all matmuls of a step together are fastest, until `deadline`.

        `found` are measurements of single matmuls. Return three values. The first maps names of matmuls, such as "qkv",
        to the best tile sizes. The second is the seconds of the step before the search, with the best tile sizes of
        single matmuls. The third is the seconds of the step with the returned tile sizes.
        """
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

    def _tried(self, problem: LinearProblem, found: Sequence[TimedLinear]) -> list[AnyTiles]:
        """Return the tile sizes to try for a matmul. `found` are measurements of single matmuls.

        The tile sizes that are fastest for the matmul alone come first. Variants of these that prefetch weights follow.
        The tile sizes that Ingot's compiler chooses come last.
        """
        fastest = [one.tiles for one in sorted(found, key=microseconds) if one.problem == problem][:KEPT]
        ahead: list[AnyTiles] = [replace(one, lines=lines) for one in fastest[:3] for lines in (0, 16)]
        for one in fastest[:4]:
            if isinstance(one, MatvecTiles):
                waves = problem.columns // (one.block_n * 2 * MACHINE.cores)  # waves after the first
                ahead += [replace(one, ahead=later) for later in (1, 2, 4, 8) if later < waves]
        return list(dict.fromkeys([*fastest, *ahead, best_known(problem)]))

    def row(self, pool: ProcessPoolExecutor, found: Sequence[TimedLinear], deadline: float) -> dict[str, Any]:
        best, first, least = self.refine(pool, found, deadline)
        moved = sum(self.parts[part].bytes for part in self._order())
        return {
            "decoder": self.decoder.name,
            "tokens": self.tokens,
            "microseconds_by_itself": round(first * 1e6, 1),
            "microseconds": round(least * 1e6, 1),
            "fraction": round(moved / least / self.bench.pool.copy, 4),
            "pauses": round(PAUSE * 1e-3 * self.decoder.layers, 1),
            "best": [{"part": part, **sizes(self.parts[part], tiles)} for part, tiles in best.items()],
        }


def sizes(problem: LinearProblem, tiles: AnyTiles) -> dict[str, Any]:
    """Return the sizes of a matmul and its tile sizes by name, as JSON values."""
    shape = {"columns": problem.columns, "depth": problem.depth, "gated": problem.gated}
    return {**shape, "tokens": STEPS[problem.tokens], **asdict(tiles)}
