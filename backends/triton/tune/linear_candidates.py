"""The candidate tile sizes of a matmul."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ingot.backends.triton.launches import WARP
from ingot.backends.triton.lower.linear_choice import known_tiles
from ingot.backends.triton.lower.linear_problem import LinearProblem
from ingot.backends.triton.lower.linear_tiles import MatvecTiles, Tiles
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.tune.device import Machine
from ingot.ir.types import DTYPES

AnyTiles = MatvecTiles | Tiles


def candidates(problem: LinearProblem, machine: Machine) -> list[AnyTiles]:
    """Return the best known tiles, and tiles with a sensible number of programs and bytes per program."""
    first, _ = known_tiles(problem.product(), problem.tokens, machine.sm)
    found = _matvec_candidates(problem) if problem.tokens == 1 else _tile_candidates(problem, machine)
    return list(dict.fromkeys([first, *found]))


def _matvec_candidates(problem: LinearProblem) -> Iterator[MatvecTiles]:
    """Yield tiles with 64 to 256 bytes of weights per thread, which has 128 registers if four blocks run at once."""
    parts = 2 if problem.gated else 1
    for block_k in (512, 1024, 2048, 4096):
        for warps in (4, 8):
            for held in (64, 128, 256):
                block_n = held * WARP * warps // (block_k * DTYPES[problem.dtype].itemsize * parts)
                if block_k <= problem.depth and 1 <= block_n <= 32:
                    yield MatvecTiles(block_n, block_k, warps)


def _tile_candidates(problem: LinearProblem, machine: Machine) -> Iterator[Tiles]:
    """Yield tiles of grids with at most two programs per multiprocessor. Stages fill the shared memory of one resident
    program per multiprocessor, or of two."""
    for block_n, splits, block_k, programs in product((16, 32, 64, 128), (1, 2, 4, 8), (128, 256), (1, 2)):
        blocks = -(-problem.columns // block_n)
        crowded = blocks * splits > 2 * machine.cores
        if ((splits > 1 or block_n < 64) and crowded) or (block_n == 128 and problem.gated):
            continue  # no gain: smaller tiles read x more often, and more splits write more sums
        if blocks * splits < machine.cores // 3:
            continue
        stages = stages_that_fit(problem, machine, block_n, block_k, splits, programs)
        if stages < 2 or problem.depth < splits * block_k:
            continue
        for lines in (0, 16):
            yield Tiles(block_n, block_k, splits, 4, stages, lines)


def stages_that_fit(
    problem: LinearProblem, machine: Machine, block_n: int, block_k: int, splits: int, programs: int
) -> int:
    """Return the stages: at most 8, at most one more than a program has blocks, and as many as fit into its share of
    shared memory."""
    block = (block_n * (2 if problem.gated else 1) + problem.tokens) * block_k * DTYPES[problem.dtype].itemsize
    steps = -(-problem.depth // (splits * block_k))
    return min(8, steps + 1, (shared_memory(machine.sm) // programs - 4096) // block)


def more_candidates(problem: LinearProblem, tiles: AnyTiles) -> list[AnyTiles]:
    """Return variants of the best tiles so far, with other numbers of prefetched lines or of warps."""
    more: list[AnyTiles] = [replace(tiles, lines=lines) for lines in (0, 4, 8, 32)]
    return [*more, replace(tiles, warps=12 - tiles.warps)] if problem.tokens > 1 and tiles.warps in (4, 8) else more
