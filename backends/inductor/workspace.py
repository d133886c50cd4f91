"""Measure the memory that a compiled region allocates, by running it: the program does not say how much."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from ingot.backends.inductor.library import open_library
from ingot.ir.errors import BackendError


def allocations(call: Callable[[], Any]) -> list[int]:
    """Run `call`, and return the size of each allocation and free in torch's CPU allocator, in order of time.

    Sizes are in bytes: positive for an allocation, negative for a free. The last one frees the result of `call`.
    """
    with profile(use_cpu=True, profile_memory=True) as seen:
        kept = call()
    del kept
    return [event.nbytes() for event in seen.kineto_results.events() if event.name() == "[memory]"]


def peak(changes: Sequence[int]) -> int:
    """Return the most bytes allocated at once.

    `changes` are sizes of allocations (positive) and frees (negative), in order of time.
    """
    return max(itertools.accumulate(changes), default=0)


def measure(library: Path, args: Sequence[torch.Tensor], threads: int) -> int:
    """Call the CPU library of a region (calls compiled together), and return the peak bytes that the call allocates.

    `args` are the inputs. The peak includes the results. Kernels allocate scratch per thread, so the call runs with
    `threads` threads.
    """
    run = open_library(library)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run(list(args))  # the first call also allocates what later calls share
        return peak(allocations(lambda: run(list(args))))
    finally:
        torch.set_num_threads(before)


def measure_cuda(library: Path, make_args: Callable[[], Sequence[torch.Tensor]]) -> int:
    """Call the GPU library of a region (calls compiled together), and return the peak bytes that the call allocates.

    The bytes are GPU memory and include the results. `make_args` makes the input tensors. Raises BackendError if the
    GPU lacks the memory for inputs and call.
    """
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
            "the GPU lacks the memory to call a region once at its largest sizes, to measure what it allocates",
            where=str(error).partition("\n")[0],
            hint="free memory of the GPU, or compile with a smaller --max-tokens",
        ) from error
    finally:
        args = ()
        torch.cuda.empty_cache()  # this process continues, and the artifact's golden run needs the memory
