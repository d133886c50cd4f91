"""Measure how long work takes on a GPU."""

import statistics
from collections.abc import Callable, Sequence

import torch


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """Call `work` once to warm up, then `rounds` times, and return the median GPU seconds of a call.

    `work` launches on the current stream; CUDA events measure its time.
    """
    work()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e-3)
    return statistics.median(times)


# Cycles that the device waits before timing: 4 ms at 2 GHz, longer than the host needs to enqueue the launches.
_HEAD_START = 8_000_000


def row_seconds(work: Sequence[Callable[[], object]]) -> float:
    """Call the functions of `work` in order on the current stream, and return the GPU seconds that all take together.

    The host enqueues all launches before the device begins, so that host time does not count.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_HEAD_START)
    begin.record()
    for one in work:
        one()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
