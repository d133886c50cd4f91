"""Measure how long work takes on a GPU."""

import statistics
from collections.abc import Callable, Sequence

import torch


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """Measure the GPU time of `work`: call it once to warm up, then `rounds` times. Return the median in seconds.

    `work` launches kernels on the current stream. CUDA events measure the time.
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
    """Call the functions in `work` in order, and return the GPU seconds that their kernels take together.

    They launch on the current stream. The GPU starts only when the host has launched all of them, so that host time
    does not count.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_HEAD_START)
    begin.record()
    for one in work:
        one()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
