"""The peer backend's kernel for many bytes: sums bit by bit, many calls, ranks of different speed, waits that end."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import triton.language as tl
from peer_ranks import CHUNK_BYTES, PROGRAMS, Host, bits, drawn_values, read_clock, run_ranks
from run_seed import again, run_seed

from ingot.backends.collectives import sum_in_order
from ingot.backends.peer import kernel
from ingot.backends.peer import wait as waiting
from ingot.backends.peer.layout import (
    ABORT,
    ABORTED,
    ERROR,
    MOST_BYTES,
    PUSH,
    PUSH_CHUNK_BYTES,
    PUSH_SLOTS,
    PUSH_VALUES,
    VALUES,
    VECTOR_BYTES,
    shared_bytes,
)
from ingot.backends.peer.prepared import divided

pytestmark = pytest.mark.one_in_file(3)

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on CPUs")
CHUNK = CHUNK_BYTES // VECTOR_BYTES  # vectors


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel, waiting):
        monkeypatch.setattr(module, "globaltimer", read_clock)
        monkeypatch.setattr(module, "_READS", tl.constexpr(16))  # the interpreter reads slowly


def check_calls(
    dtype: torch.dtype, calls: list[tuple[int, int]], seed: str, *, first: int = 0, adds: bool = False
) -> None:
    """Run calls of (vectors, most programs) on both ranks. `first` is the count of chunks of each program before."""
    host, each = Host(2), VECTOR_BYTES // dtype.itemsize
    for place in range(2):
        host.push_counts(place)[:], host.push_flags(place)[:] = first, first
    draws = [random.Random(f"{seed} {place}") for place in range(2)]
    values = [[drawn_values(draw, each * vectors, dtype) for vectors, _ in calls] for draw in draws]
    residuals = [drawn_values(draws[0], each * vectors, dtype) for vectors, _ in calls]  # equal on both ranks

    def work(place: int) -> list[list[int]]:
        found = []
        for x, residual, (_, programs) in zip(values[place], residuals, calls, strict=True):
            time.sleep(draws[place].choice((0.0, 0.0, 0.003)))
            found.append(bits(host.push(place, x, residual if adds else None, programs=programs)))
        return found

    totals = [sum_in_order(list(parts)) for parts in zip(*values, strict=True)]
    wanted = [bits(residual + total if adds else total) for residual, total in zip(residuals, totals, strict=True)]
    for place, found in enumerate(run_ranks(2, work)):
        assert found == wanted, again((dtype, calls, place))
    assert not host.words.any()
    assert torch.equal(host.push_counts(0), host.push_counts(1))
    for place in range(2):
        assert torch.equal(host.push_flags(place), host.push_counts(place))


@needs_interpreter
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_both_ranks_have_the_sum(dtype: torch.dtype, adds: bool) -> None:
    """Calls of one vector to nine chunks of three programs, in turns, and some with fewer programs.

    The interpreter rounds to bfloat16 toward zero, so a GPU computes that."""
    draw = random.Random(f"{run_seed()} {dtype} {adds}")
    calls = [(1, 3), (3 * CHUNK, 3), (CHUNK + 1, 1), (27 * CHUNK - 1, 3), (9 * CHUNK, 1)]
    calls += [(draw.randint(1, 12 * CHUNK), draw.randint(1, 4)) for _ in range(6)]
    check_calls(dtype, calls, f"{run_seed()} {dtype}", adds=adds)


@needs_interpreter
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_slow_between_chunks(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is then as many chunks ahead as it can be, and overwrites nothing that is not yet read."""
    host, draw = Host(2), random.Random(f"{run_seed()} {slow}")
    counts = [CHUNK * 2 * draw.randint(1, 9) for _ in range(6)]
    values = [[drawn_values(draw, 4 * count, torch.float32) for count in counts] for _ in range(2)]
    delays = random.Random(draw.random())

    def work(place: int) -> list[list[int]]:
        def read_slowly() -> object:  # a wait reads the clock when it begins
            time.sleep(delays.choice((0.0, 0.02)))
            return read_clock()

        if place == slow:
            monkeypatch.setattr(waiting, "globaltimer", read_slowly)
        return [bits(host.push(place, x, programs=2)) for x in values[place]]

    wanted = [bits(sum_in_order(list(parts))) for parts in zip(*values, strict=True)]
    assert run_ranks(2, work) == [wanted] * 2, again((slow, counts))
    assert not host.words.any()


@needs_interpreter
def test_counts_overflow() -> None:
    """After 2^31 chunks, counts are negative. A program that has sent none since then still gets what it waits for."""
    check_calls(
        torch.float32, [(1, 3), (9 * CHUNK, 3), (1, 3), (2 * CHUNK, 3), (CHUNK, 3)], run_seed(), first=2**31 - 3
    )


@needs_interpreter
def test_a_chunk_overwrites_that_of_four_before() -> None:
    """The other rank may still read those between. And it may be ahead: its flag is larger than the count."""
    host, each = Host(2), CHUNK_BYTES // 4
    host.push_flags(0)[:] = 5
    host.push_slots(0).view(torch.float32)[:] = 100.0
    for number in range(1, 6):
        # One chunk of each call; its slot is that of the count.
        assert host.push(0, torch.full((each,), float(number)), programs=1).tolist() == [100.0 + number] * each
    assert host.push_counts(0)[:2].tolist() == [5, 0] and host.push_flags(1)[:2].tolist() == [5, 0]
    there = host.push_slots(1).view(torch.float32)
    assert there[0, :, 0].tolist() == [4.0, 5.0, 2.0, 3.0], "of the counts 4, 5, 2 and 3"
    assert not there[1:].any() and not host.push_flags(0)[:2].ne(5).any()


@needs_interpreter
def test_no_more_is_sent_than_one_chunk_ahead() -> None:
    """Before the other rank comes, a rank sends two chunks. It sends the third one after it has received the first."""
    host, each = Host(2), CHUNK_BYTES // 4
    x = torch.arange(5.0).repeat_interleave(each) + 1
    host.push(0, x, programs=1, timeout=50_000)
    assert host.push_flags(1)[0] == 2 and host.words[0].tolist() == [0, 2]
    host.words[:] = 0
    host.push_counts(0)[:], host.push_flags(0)[0] = 0, 1
    result = host.push(0, x, programs=1, timeout=50_000)
    assert host.push_flags(1)[0] == 3 and host.words[0, ERROR] == 2
    assert result[::each].tolist() == [1.0, -7.0, -7.0, -7.0, -7.0], "one sum, with the zeros of the slot"
    assert host.push_slots(1).view(torch.float32)[0, :, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


@needs_interpreter
def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    host, x = Host(2), torch.ones(5 * CHUNK_BYTES)
    begin = time.monotonic()
    assert bool((host.push(1, x, timeout=100_000) == -7).all()), "no sum of what has not come"
    assert time.monotonic() - begin > 0.1
    assert host.words[1].tolist() == [0, 1], "1 + the rank that did not come"
    begin = time.monotonic()
    host.push(1, x)
    assert time.monotonic() - begin < 10, "a later call does not wait"
    assert host.words[1].tolist() == [0, 1]


@needs_interpreter
def test_an_abort_ends_the_wait() -> None:
    host = Host(2)

    def tell() -> None:
        host.words[0, ABORT] = 1

    timer = threading.Timer(0.2, tell)
    timer.start()
    assert bool((host.push(0, torch.ones(3 * CHUNK_BYTES)) == -7).all())
    timer.join()
    assert host.words[0, ERROR] == ABORTED


@needs_interpreter
def test_the_kernels_share_no_memory_but_the_words() -> None:
    """Each may come between calls of the other one."""
    host = Host(2)

    def work(place: int) -> list[float]:
        found = []
        for number in range(1, 4):
            for run in (host.reduce, host.push):
                found += run(place, torch.full((4 * CHUNK_BYTES,), float(number + place))).unique().tolist()
        return found

    assert run_ranks(2, work) == [[3.0, 3.0, 5.0, 5.0, 7.0, 7.0]] * 2


def test_the_layout_is_disjoint() -> None:
    assert PUSH == VALUES + 2 * 2 * MOST_BYTES and PUSH_VALUES % 128 == 0
    assert shared_bytes(2, 264) >= PUSH_VALUES + 264 * PUSH_SLOTS * PUSH_CHUNK_BYTES
    assert shared_bytes(4, 264) < PUSH_VALUES + PUSH_SLOTS * PUSH_CHUNK_BYTES * 264, "for two ranks only"
    host = Host(2)
    host.push_counts(0)[:] = 1
    host.push_slots(0)[:] = 1
    assert not host.push_flags(0).any() and not host.memory[0, :PUSH].any() and host.push_slots(0).shape[0] == PROGRAMS


def test_chunks_are_equal_and_fit() -> None:
    """All vectors are in the chunks, no program is idle, and only the last chunk may be shorter."""
    draw = random.Random(run_seed())
    for _ in range(500):
        programs, most = draw.randint(1, 600), 32 * draw.randint(1, 64)
        vectors = draw.randint(1, draw.choice((1, 100, 10_000, 10_000_000)))
        blocks, chunk = divided(vectors, programs, most)
        chunks = -(-vectors // chunk)
        assert chunk % 32 == 0 and 0 < chunk <= most and 0 < blocks <= min(programs, chunks)
        assert -(-chunks // blocks) == -(-vectors // (programs * most)), again((vectors, programs, most))
