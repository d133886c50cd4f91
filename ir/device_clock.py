"""How long a GPU takes for something."""

import statistics
from collections.abc import Callable

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
