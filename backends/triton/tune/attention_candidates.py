"""The tile sizes of decode attention that tuning times."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ingot.backends.triton.lower.attention.choice import enough_warps, known_tiles
from ingot.backends.triton.lower.attention.problem import DecodeProblem
from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.tune.device import Machine


def candidates(problem: DecodeProblem, machine: Machine) -> list[DecodeTiles]:
    """Return the tile sizes to time for a decode attention.

    They are the best known ones, and a list of others that fit into shared memory.
    """
    known = known_tiles(problem, machine.sm)[0]
    if not problem.cache_form.equal:
        return list(dict.fromkeys([known, *_sizes_of_forms(problem, machine)]))
    return list(dict.fromkeys([known, *(enough_warps(problem, tiles) for tiles in _sizes(problem, machine))]))


def _sizes_of_forms(problem: DecodeProblem, machine: Machine) -> Iterator[DecodeTiles]:
    """Yield tile sizes to time for caches in which keys and values have different widths.

    Their `early` is 0: kernels for such caches load no keys before the previous kernel has ended.
    """
    for keys, stages, programs, warps in product((16, 32, 64), (3, 5), (1, 2), (4, 8)):
        tiles = DecodeTiles(keys, stages, programs, warps=warps, early=0)
        if _bytes(problem, tiles) * programs <= shared_memory(machine.sm):
            yield tiles


def _sizes(problem: DecodeProblem, machine: Machine) -> Iterator[DecodeTiles]:
    # A program that loads early needs shared memory while the previous kernel has its own. With three stages it needs
    # half as much as with five.
    for keys, programs, (stages, early) in product((32, 64, 128), (1, 2, 4), ((3, 1), (5, 1), (5, 0))):
        tiles = DecodeTiles(keys, stages, programs, ahead=0 if early else 2, early=early)
        if _bytes(problem, tiles) * min(programs, 2) <= shared_memory(machine.sm):
            yield tiles
    # With many tokens, many small programs hide latency better.
    for keys, stages, programs, warps in product((32, 64), (3, 5), (2, 4), (1, 2)):
        tiles = DecodeTiles(keys, stages, programs, warps=warps, early=0)
        if _bytes(problem, tiles) * programs <= shared_memory(machine.sm):
            yield tiles


def _bytes(problem: DecodeProblem, tiles: DecodeTiles) -> int:
    """Return the bytes of shared memory that a program needs for the tiles of keys and values in flight.

    Every second stage of the loop holds a tile.
    """
    position = problem.position_bytes // problem.cache_heads
    return (tiles.stages - 1) // 2 * tiles.keys * position


def more_candidates(problem: DecodeProblem, tiles: DecodeTiles) -> list[DecodeTiles]:
    """Return variants of `tiles`, the best tile sizes so far, with other numbers of prefetched tiles or stages."""
    ahead = [replace(tiles, ahead=ahead) for ahead in (0, 2, 4)] if problem.append else []
    return [*ahead, replace(tiles, stages=3), replace(tiles, stages=7)]
