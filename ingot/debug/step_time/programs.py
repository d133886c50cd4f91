"""Distribute the programs (thread blocks) of a kernel launch over the multiprocessors of a GPU."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.backends.triton.launches import Launch, evaluate
from ingot.backends.triton.lower.attention.problem import DecodeProblem
from ingot.backends.triton.lower.attention.split_limits import split_limits
from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.ir.artifact.tuning import Choice
from ingot.ir.machine.gpus import Gpu, resident_blocks
from ingot.ir.masks import CAUSAL, Mask


@dataclass(frozen=True)
class Launched:
    """A kernel launch and how it fills the GPU.

    Its thread blocks run in `waves`. A wave is as many thread blocks as run at the same time. `uneven` is the work of
    the busiest multiprocessor divided by the mean. The defaults describe a launch that fills the GPU evenly. They are
    used for kernels of libraries.
    """

    name: str
    waves: int = 1
    uneven: float = 1.0


def launched(launch: Launch, sizes: Mapping[str, int], gpu: Gpu) -> Launched:
    """Return how a recorded kernel launch fills the GPU in a step.

    `sizes` are the sizes of the step's symbolic dims, which determine the grid. All thread blocks are assumed to have
    equal work.
    """
    x, y, z = (evaluate(size, sizes) for size in launch.grid)
    programs = x * y * z
    if not programs:
        return Launched(launch.entry, 0)
    room = gpu.cores * resident_blocks(gpu, launch.warps, launch.shared)
    return Launched(launch.entry, -(-programs // room), uneven(programs, gpu.cores))


def uneven(programs: int, cores: int) -> float:
    """Return the work of the busiest multiprocessor divided by the mean.

    A launch has `programs` thread blocks of equal work. The GPU has `cores` multiprocessors.
    """
    return -(-programs // cores) * cores / programs


@dataclass(frozen=True)
class Prompts:
    """The prefill attention of a step.

    There are `sequences` sequences. Each has `tokens` new tokens, and `context` positions after the step. `heads` is
    the number of query heads. `mask` names the attention mask, such as "causal".
    """

    sequences: int
    tokens: int
    context: int
    heads: int
    mask: str = CAUSAL.name

    def launched(self, name: str, rows: int, cores: int) -> Launched:
        """Return how the prefill attention kernel `name` fills a GPU of `cores` multiprocessors.

        A tile is `rows` tokens of one head. A multiprocessor computes one tile after another, and waits for the first
        keys of each. So each tile counts as a wave.
        """
        tiles = -(-self.tokens // rows) * self.sequences * self.heads
        return Launched(name, -(-tiles // cores), self.uneven(rows, cores))

    def uneven(self, rows: int, cores: int) -> float:
        """Return the work of the busiest multiprocessor divided by the mean of the useful work.

        A tile is `rows` tokens of one head. All its rows, even empty ones, compute every position that any of them
        attends to. Tiles with the most work begin first. Each tile begins on the next free multiprocessor.
        """
        mask = Mask.named(self.mask)

        def seen(first: int, last: int) -> int:
            return min(mask.end(last), self.context) - max(0, mask.first(first))

        places = range(self.context - self.tokens, self.context)
        each = sorted(
            (seen(tile[0], tile[-1]) for tile in (places[at : at + rows] for at in range(0, self.tokens, rows))),
            reverse=True,
        )
        tiles = [positions for positions in each for _ in range(self.sequences * self.heads)]
        needed = sum(seen(place, place) for place in places)
        return _longest(tiles, cores) * rows * cores / (self.sequences * self.heads * needed)


# Warps of decode attention on a multiprocessor at a time: its programs use most registers that a thread can have.
_WARPS = 8


@dataclass(frozen=True)
class Contexts:
    """The decode attention of a step. Each of `tokens` tokens attends to `context` cached positions.

    The kernel splits each context into parts for several thread blocks. The tile sizes in `choice` determine the parts.
    """

    tokens: int
    context: int
    choice: Choice

    def launched(self, name: str, cores: int) -> Launched:
        """Return how the decode attention kernel `name` fills a GPU of `cores` multiprocessors.

        A split is the part of a context that one thread block reads, in whole tiles. The kernel has a minimum number of
        splits. If it uses only these, they may load their first tile before the previous kernel has ended. This tile
        then costs no time. With more splits, each must read the context lengths first.

        Only one wave counts, since thread blocks of later waves begin while others read.
        """
        problem, tiles = DecodeProblem.of(self.choice), DecodeTiles(**self.choice.tiles)
        limits = split_limits(problem, tiles, cores)
        splits = limits.base
        if limits.shares:
            share = max(math.ceil(self.tokens * self.context / limits.shares), tiles.keys)
            splits = min(max((self.context + share // 2) // share, limits.base), limits.most)
        all_tiles = math.ceil(self.context / tiles.keys)
        in_turn = math.ceil(all_tiles / splits)
        items = self.tokens * problem.kv_heads * min(splits, all_tiles)
        room = cores * min(max(1, _WARPS // tiles.warps), math.ceil(items / cores))
        waves = math.ceil(items / room)
        early = int(bool(tiles.early) and splits == limits.base)
        longest = (waves * in_turn - early) * tiles.keys
        mean = self.tokens * problem.kv_heads * self.context / room
        return Launched(name, int(longest > 0), longest / mean)


def _longest(works: Sequence[int], workers: int) -> int:
    """Return the total work of the busiest of `workers` workers.

    Each worker takes the next item of `works` as soon as it is free.
    """
    ends = [0] * workers
    for work in works:
        heapq.heapreplace(ends, ends[0] + work)
    return max(ends)
