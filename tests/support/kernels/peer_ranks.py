"""Ranks of the peer backend's kernel without GPUs: processes that run it by Triton's interpreter, all at once.

Their shared memory is memory of the host. A process is forked for each rank, because the interpreter keeps the program
that it runs in variables of its module.
"""

import mmap
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl

from ingot.backends.peer import kernel
from ingot.backends.peer.layout import BLOCKS, COUNTS, MOST_RANKS, SHARED_BYTES, TILE_BYTES, VECTOR_BYTES, WORDS

SECONDS = 60.0


class Host:
    """The shared memory of all ranks, and the words of each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size * SHARED_BYTES + size * WORDS * 4)  # of this process and of its children
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = whole[: size * SHARED_BYTES].view(size, SHARED_BYTES)
        self.words = whole[size * SHARED_BYTES :].view(torch.int32).view(size, WORDS)
        self.table = torch.tensor([one.data_ptr() for one in self.memory])

    def counts(self, place: int) -> torch.Tensor:
        return self.memory[place, COUNTS : COUNTS + 4 * BLOCKS].view(torch.int32)

    def flags(self, place: int) -> torch.Tensor:
        return self.memory[place, :COUNTS].view(torch.int32).view(BLOCKS, MOST_RANKS)

    def reduce(
        self,
        place: int,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        blocks: int = 3,
        timeout: int = int(SECONDS * 1e6),
    ) -> Any:
        """Run the kernel as a rank, with so many blocks at most. `timeout` is in microseconds."""
        result = torch.full_like(x, -7)
        item = x.element_size()
        grid = min(blocks, -(-x.nbytes // TILE_BYTES))
        constants = {"RANKS": self.size, "BLOCK": TILE_BYTES // item, "VECTOR": VECTOR_BYTES // item}
        vectors = x.nbytes // VECTOR_BYTES
        kernel.all_reduce[(grid,)](
            x, residual, result, self.table, self.words[place], vectors, place, timeout, **constants, DEPENDENT=False
        )
        return result


def read_clock() -> Any:
    """The clock of a GPU, which the interpreter lacks: nanoseconds."""
    return tl.full((), time.monotonic_ns(), tl.int64)


def run_ranks(size: int, work: Callable[[int], Any]) -> Sequence[Any]:
    """Run `work` as each rank, in processes at once, and return the results in the order of ranks."""
    context = multiprocessing.get_context("fork")  # the children share what the parent has mapped
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def run(place: int) -> None:
        try:
            torch.set_num_threads(1)  # a pool of threads does not survive a fork
            pipes[place][1].send(work(place))
        except BaseException as error:
            pipes[place][1].send(repr(error))
            raise

    children = [context.Process(target=run, args=(place,)) for place in range(size)]
    for child in children:
        child.start()
    try:
        return [read.recv() if read.poll(SECONDS) else "nothing came" for read, _ in pipes]
    finally:
        for child in children:
            child.join(1)
            child.kill()
