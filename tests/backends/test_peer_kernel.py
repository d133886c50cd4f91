"""The kernel of the peer backend: sums bit by bit, many calls, ranks of different speed, and waits that end."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
import triton.language as tl
from peer_ranks import Host, bits, drawn_values, read_clock, run_ranks
from run_seed import again, run_seed

from ingot.backends.collectives import sum_in_order
from ingot.backends.peer import kernel
from ingot.backends.peer import wait as waiting
from ingot.backends.peer.layout import (
    ABORT,
    ABORTED,
    ERROR,
    MOST_BYTES,
    TILE_BYTES,
    VALUES,
    VECTOR_BYTES,
    WORD_BYTES,
    shared_bytes,
)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on CPUs"),
    pytest.mark.one_in_file(3),
]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel, waiting):
        monkeypatch.setattr(module, "globaltimer", read_clock)
        monkeypatch.setattr(module, "_READS", tl.constexpr(16))  # the interpreter reads slowly


def check_calls(size: int, dtype: torch.dtype, sizes: list[int], seed: str, first: int = 0) -> None:
    """Run calls of `sizes` vectors on all ranks. `first` is the count of calls before them."""
    host = Host(size)
    for place in range(size):
        host.counts(place)[:] = first
    each = VECTOR_BYTES // dtype.itemsize
    draws = [random.Random(f"{seed} {place}") for place in range(size)]
    values = [[drawn_values(draw, each * count, dtype) for count in sizes] for draw in draws]

    def work(place: int) -> list[list[int]]:
        found = []
        for x in values[place]:
            time.sleep(draws[place].choice((0.0, 0.0, 0.003)))
            found.append(bits(host.reduce(place, x)))
        return found

    wanted = [bits(sum_in_order(list(parts))) for parts in zip(*values, strict=True)]
    for place, found in enumerate(run_ranks(size, work)):
        assert found == wanted, again((size, dtype, sizes, place))
    assert not host.words.any()
    assert not any(host.slots(place).any() for place in range(size)), "all that was sent was read"


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (4, torch.float16)], ids=str)
def test_all_ranks_have_the_sum_in_their_order(size: int, dtype: torch.dtype) -> None:
    """Calls of one vector to four rounds of three blocks, in turns: blocks take part in different calls.

    The interpreter rounds to bfloat16 toward zero, so a GPU computes that."""
    draw = random.Random(f"{run_seed()} {size} {dtype}")
    tile = TILE_BYTES // VECTOR_BYTES
    sizes = [1, 2 * tile, tile + 1, 12 * tile, *(draw.randint(1, 12 * tile) for _ in range(4))]
    check_calls(size, dtype, sizes, f"{run_seed()} {dtype}")


def test_counts_overflow() -> None:
    """After 2^31 calls, counts are negative, and slots take turns as before."""
    check_calls(2, torch.float32, [1, 1, 1, 1, 200, 1], run_seed(), first=2**31 - 3)


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float16), (4, torch.float32)], ids=str)
def test_a_residual_is_added_to_the_rounded_sum(size: int, dtype: torch.dtype) -> None:
    """The bits of an add after the all-reduce, in calls of part of a tile and of several rounds."""
    draw = random.Random(f"{run_seed()} {size} {dtype} residual")
    host, each, tile = Host(size), VECTOR_BYTES // dtype.itemsize, TILE_BYTES // VECTOR_BYTES
    counts = [1, tile + 1, 4 * tile, draw.randint(1, 9 * tile)]
    values = [[drawn_values(draw, each * count, dtype) for count in counts] for _ in range(size)]
    residuals = [drawn_values(draw, each * count, dtype) for count in counts]  # equal on all ranks
    found = run_ranks(
        size, lambda place: [bits(host.reduce(place, *pair)) for pair in zip(values[place], residuals, strict=True)]
    )
    totals = [sum_in_order(list(parts)) for parts in zip(*values, strict=True)]
    wanted = [bits(residual + total) for residual, total in zip(residuals, totals, strict=True)]
    assert found == [wanted] * size, again((size, dtype, counts))
    assert not host.words.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_one_rank_adds_a_residual(dtype: torch.dtype) -> None:
    """The kernel after a sum by NCCL: without shared memory, in more tiles than a program has rounds."""
    draw = random.Random(f"{run_seed()} {dtype} alone")
    count = (7 * TILE_BYTES + VECTOR_BYTES) // dtype.itemsize
    x, residual = (drawn_values(draw, count, dtype) for _ in range(2))
    result = torch.full_like(x, -7)
    constants = {"RANKS": 1, "BLOCK": TILE_BYTES // WORD_BYTES}
    vectors = x.nbytes // VECTOR_BYTES
    kernel.all_reduce[(3,)](x, residual, result, None, None, None, vectors, None, None, **constants, DEPENDENT=False)
    assert bits(result) == bits(residual + x), again(dtype)


def send(host: Host, rank: int, count: int, x: torch.Tensor) -> None:
    """Send the values of another rank to the first block of rank 0, for its call `count`."""
    words = ~x.view(torch.int32)
    host.slots(0)[count & 1, rank, 0, : len(words)] = words


def test_slots_take_turns() -> None:
    """A rank may be one call ahead: its next values are not read, and they stay. What was read is 0 again."""
    host = Host(2)
    send(host, 1, 1, torch.full((4,), 10.0))
    for count in (1, 2, 3):
        send(host, 1, count + 1, torch.full((4,), 10.0 * (count + 1)))
        assert host.reduce(0, torch.full((4,), float(count))).tolist() == [11.0 * count] * 4
        assert host.counts(0)[:2].tolist() == [count, 0]
        assert host.slots(0).count_nonzero() == 4, "those of the next call"
        sent = host.slots(1)[count & 1, 0, 0]
        assert (~sent[:4]).view(torch.float32).tolist() == [float(count)] * 4 and not sent[4:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_word_that_would_be_sent_as_nothing(dtype: torch.dtype) -> None:
    """A NaN of all ones, in one element of a word or in both: the sum has NaN in its place, and arrives."""
    ones = torch.full((16 // dtype.itemsize,), -1, dtype=torch.int32 if dtype.itemsize == 4 else torch.int16)
    x = ones.view(dtype)
    x[1 : x.numel() // 2] = 2.0
    host = Host(2)
    for found in run_ranks(2, lambda place: host.reduce(place, x).tolist()):
        assert bits(torch.tensor(found, dtype=dtype)) == bits(x + x)
    assert not host.words.any()


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_does_not_come_ends_the_wait(size: int) -> None:
    host, x = Host(size), torch.ones(4)
    for rank in range(1, size - 1):
        send(host, rank, 1, x)  # the others have come
    begin = time.monotonic()
    assert host.reduce(0, x, timeout=100_000).tolist() == [-7.0] * 4, "no sum of what has not come"
    assert time.monotonic() - begin > 0.1
    assert host.words[0].tolist() == [0, size], "1 + the rank that did not come"
    begin = time.monotonic()
    host.reduce(0, x)
    assert time.monotonic() - begin < 5, "a later call does not wait"
    assert host.words[0].tolist() == [0, size]


def test_an_abort_ends_the_wait() -> None:
    host = Host(2)

    def tell() -> None:
        host.words[0, ABORT] = 1

    timer = threading.Timer(0.2, tell)
    timer.start()
    assert host.reduce(0, torch.ones(4)).tolist() == [-7.0] * 4
    timer.join()
    assert host.words[0, ERROR] == ABORTED


def test_the_layout_is_disjoint() -> None:
    assert VALUES % VECTOR_BYTES == 0
    assert shared_bytes(8, 0) >= VALUES + 2 * 8 * MOST_BYTES
    host: Any = Host(4)
    host.counts(0)[:] = 1
    assert not host.slots(0).any()
