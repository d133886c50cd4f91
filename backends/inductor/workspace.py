"""What a compiled region allocates: measured, because only the compiler knows."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from ingot.backends.inductor.library import open_library
from ingot.ir.errors import BackendError


def allocations(call: Callable[[], Any]) -> list[int]:
    """Bytes that `call` takes from torch's CPU allocator and, negative, gives back, in order; its result is kept."""
    with profile(use_cpu=True, profile_memory=True) as seen:
        kept = call()
    del kept
    return [event.nbytes() for event in seen.kineto_results.events() if event.name() == "[memory]"]


def peak(changes: Sequence[int]) -> int:
    """The most that is allocated at once."""
    return max(itertools.accumulate(changes), default=0)


def measure(library: Path, args: Sequence[torch.Tensor], threads: int) -> int:
    """Bytes that a call of a region's library allocates at its peak, its results among them.

    Kernels of libraries take scratch for each thread, hence `threads`.
    """
    run = open_library(library)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run(list(args))  # the first call sets up what later ones share
        return peak(allocations(lambda: run(list(args))))
    finally:
        torch.set_num_threads(before)


def measure_cuda(library: Path, make_args: Callable[[], Sequence[torch.Tensor]]) -> int:
    """The same on a GPU, where torch's allocator counts. Raises BackendError where the GPU has not so much memory."""
    try:
        args = make_args()
        run = open_library(library)
        run(list(args))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(list(args))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError as error:
        raise BackendError(
            "the GPU has no memory to call a region once at its largest, which tells what it allocates",
            where=str(error).partition("\n")[0],
            hint="free memory of the GPU, or compile with a smaller --max-tokens",
        ) from error
    finally:
        args = ()
        torch.cuda.empty_cache()  # this process lives on, and the artifact's golden run wants the memory
