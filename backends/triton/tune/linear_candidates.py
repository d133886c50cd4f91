"""The tile sizes of matmul kernels that tuning times."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ingot.backends.triton.launches import WARP
from ingot.backends.triton.lower.linear.choice import known_tiles
from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.lower.linear.tiles import MatvecTiles, Tiles
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.tune.device import Machine
from ingot.ir.types import DTYPES

AnyTiles = MatvecTiles | Tiles


def candidates(problem: LinearProblem, machine: Machine) -> list[AnyTiles]:
    """Return the tile sizes to time for a matmul.

    They are the best known ones, and a list of others with a sensible number of programs.
    """
    first, _ = known_tiles(problem.product(), problem.tokens, machine.sm)
    found = _matvec_candidates(problem) if problem.tokens == 1 else _tile_candidates(problem, machine)
    return list(dict.fromkeys([first, *found]))


def _matvec_candidates(problem: LinearProblem) -> Iterator[MatvecTiles]:
    """Yield tile sizes to time for one row of x. With each, a thread loads 64 to 256 bytes of weights at once.

    A thread has 128 registers of 4 bytes if four blocks run at once on a multiprocessor.
    """
    parts = 2 if problem.gated else 1
    for block_k in (512, 1024, 2048, 4096):
        for warps in (4, 8):
            for held in (64, 128, 256):
                block_n = held * WARP * warps // (block_k * DTYPES[problem.dtype].itemsize * parts)
                if block_k <= problem.depth and 1 <= block_n <= 32:
                    yield MatvecTiles(block_n, block_k, warps)


def _tile_candidates(problem: LinearProblem, machine: Machine) -> Iterator[Tiles]:
    """Yield tile sizes to time for several rows of x, most with at most two programs per multiprocessor.

    The number of loop stages is the largest that fits into shared memory, for one or two programs per multiprocessor.
    """
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
    """Return the most loop stages of a matmul kernel with which `programs` programs fit into one multiprocessor.

    Its shared memory is the limit. The result is at most 8, and at most one more than the iterations of a program.
    """
    block = (block_n * (2 if problem.gated else 1) + problem.tokens) * block_k * DTYPES[problem.dtype].itemsize
    steps = -(-problem.depth // (splits * block_k))
    return min(8, steps + 1, (shared_memory(machine.sm) // programs - 4096) // block)


def more_candidates(problem: LinearProblem, tiles: AnyTiles) -> list[AnyTiles]:
    """Return variants of `tiles`, the best tile sizes so far, with other numbers of prefetched lines or of warps."""
    more: list[AnyTiles] = [replace(tiles, lines=lines) for lines in (0, 4, 8, 32)]
    return [*more, replace(tiles, warps=12 - tiles.warps)] if problem.tokens > 1 and tiles.warps in (4, 8) else more
