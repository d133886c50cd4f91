"""What a compiled region allocates: measured, because only the compiler knows."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import profile


def allocations(call: Callable[[], Any]) -> list[int]:
    """Bytes that `call` takes from torch's CPU allocator and, negative, gives back, in order; its result is kept."""
    with profile(use_cpu=True, profile_memory=True) as seen:
        kept = call()
    del kept
    return [event.nbytes() for event in seen.kineto_results.events() if event.name() == "[memory]"]


def peak(changes: Sequence[int]) -> int:
    """The most that is allocated at once."""
    return max(itertools.accumulate(changes), default=0)


def measure(library: str, args: Sequence[torch.Tensor], threads: int) -> int:
    """Bytes that a call of a region's library allocates at its peak, its results among them.

    Kernels of libraries take scratch for each thread, hence `threads`.
    """
    run = torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1).run
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run(list(args))  # the first call sets up what later ones share
        return peak(allocations(lambda: run(list(args))))
    finally:
        torch.set_num_threads(before)
