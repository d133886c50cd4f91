"""Ranks of the peer backend's kernels without GPUs: processes that run them by Triton's interpreter, all at once.

Their shared memory is memory of the host. A process is forked for each rank, because the interpreter keeps the program
that it runs in variables of its module.
"""

import mmap
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl

from ingot.backends.peer import kernel, push
from ingot.backends.peer.layout import (
    BLOCKS,
    COUNTS,
    MOST_BYTES,
    PUSH,
    PUSH_COUNTS,
    PUSH_FLAG_BYTES,
    PUSH_LATE,
    PUSH_PROGRAMS,
    PUSH_SLOTS,
    PUSH_VALUES,
    SLOT_BYTES,
    TILE_BYTES,
    VALUES,
    VECTOR_BYTES,
    WORD_BYTES,
    WORDS,
    shared_bytes,
)
from ingot.backends.peer.prepared import divided

SECONDS = 60.0
# The programs that push, at most, and the bytes of their chunks: less than on a GPU, because the interpreter is slow.
PROGRAMS = 8
CHUNK_BYTES = 1024


class Host:
    """The shared memory of all ranks, and the words of each."""

    def __init__(self, size: int) -> None:
        self.size = size
        each = shared_bytes(size, PROGRAMS, CHUNK_BYTES)
        self._map = mmap.mmap(-1, size * each + size * WORDS * 4)  # of this process and of its children
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = whole[: size * each].view(size, each)
        self.words = whole[size * each :].view(torch.int32).view(size, WORDS)
        self.table = torch.tensor([one.data_ptr() for one in self.memory])

    def counts(self, place: int) -> torch.Tensor:
        return self.memory[place, COUNTS : COUNTS + 4 * BLOCKS].view(torch.int32)

    def slots(self, place: int) -> torch.Tensor:
        """What each block of each rank has sent: i32[2, ranks, BLOCKS, words]."""
        size = 2 * self.size * MOST_BYTES
        slots = self.memory[place, VALUES : VALUES + size].view(torch.int32)
        return slots.view(2, self.size, BLOCKS, SLOT_BYTES // WORD_BYTES)

    def push_counts(self, place: int) -> torch.Tensor:
        return self.memory[place, PUSH_COUNTS:PUSH_LATE].view(torch.int32)

    def push_flags(self, place: int) -> torch.Tensor:
        return self.memory[place, PUSH:PUSH_COUNTS].view(torch.int32).view(PUSH_PROGRAMS, PUSH_FLAG_BYTES // 4)[:, 0]

    def push_slots(self, place: int) -> torch.Tensor:
        slots = self.memory[place, PUSH_VALUES : PUSH_VALUES + PROGRAMS * PUSH_SLOTS * CHUNK_BYTES]
        return slots.view(PROGRAMS, PUSH_SLOTS, CHUNK_BYTES)

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
        grid = min(blocks, -(-x.nbytes // TILE_BYTES))
        constants = {"RANKS": self.size, "BLOCK": TILE_BYTES // WORD_BYTES}
        vectors = x.nbytes // VECTOR_BYTES
        own = self.memory[place].view(torch.int32)
        kernel.all_reduce[(grid,)](
            x, residual, result, own, self.table, self.words[place], vectors, place, timeout,
            **constants, DEPENDENT=False,
        )  # fmt: skip
        return result

    def push(
        self,
        place: int,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        programs: int = 3,
        timeout: int = int(SECONDS * 1e6),
    ) -> Any:
        """Run the kernel for many bytes as a rank, with so many programs at most. `timeout` is in microseconds."""
        result = torch.full_like(x, -7)
        item, vectors = x.element_size(), x.nbytes // VECTOR_BYTES
        grid, chunk = divided(vectors, programs, CHUNK_BYTES // VECTOR_BYTES)
        constants = {"CHUNK": CHUNK_BYTES // item, "VECTOR": VECTOR_BYTES // item}
        push.push[(grid,)](
            x, residual, result, self.table, self.words[place], vectors, chunk, place, timeout,
            **constants, DEPENDENT=False,
        )  # fmt: skip
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


def drawn_values(draw: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose sum depends on the order, with zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    chosen = torch.randint(0, 40, (count,), generator=generator)
    return torch.where(chosen < len(special), special[chosen.clamp(max=len(special) - 1)], values).to(dtype)


def bits(x: torch.Tensor) -> list[int]:
    """NaN has one meaning and many bits."""
    kind = torch.int32 if x.element_size() == 4 else torch.int16
    return torch.where(x.isnan(), -1, x.view(kind).int()).tolist()
