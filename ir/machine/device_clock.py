"""How long a GPU takes for something."""

import statistics
from collections.abc import Callable, Sequence

import torch


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """The median of so many rounds of `work` on the current stream, by events of the device; one goes before them."""
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


# Cycles that the device waits for: at 2 GHz more time than the host takes for a row of launches.
_HEAD_START = 8_000_000


def row_seconds(work: Sequence[Callable[[], object]]) -> float:
    """Of the pieces of `work` on the current stream, one after the other. The host has launched them all before the
    device begins, so that its own time does not count."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_HEAD_START)
    begin.record()
    for one in work:
        one()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
