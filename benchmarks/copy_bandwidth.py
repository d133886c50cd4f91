"""Measure the bandwidth of a plain copy, in bytes read and written per second: the memory bandwidth in practice."""

import time

import torch

# Far above the last-level cache: 50 MB on an H100 or H200, tens to hundreds of MB on CPUs. A copy's two buffers are at
# least four times as large.
_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
_TRIES = {"cuda": 20, "cpu": 5}


def copy_bandwidth(device: str) -> float:
    """Return the memory bandwidth of a device, "cuda" or "cpu": bytes read and written per second by a large copy.

    The best of several copies counts. The memory is freed.
    """
    source = torch.ones(_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    timed = _cuda_seconds if device == "cuda" else _cpu_seconds
    timed(source, target)  # the first copy touches the pages and raises the clocks
    least = min(timed(source, target) for _ in range(_TRIES[device]))
    bandwidth = 2 * source.nbytes / least
    del source, target
    if device == "cuda":
        torch.cuda.empty_cache()
    return bandwidth


def _cpu_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin


def _cuda_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
