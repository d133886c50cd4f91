"""The library that a region is compiled into, and how it is called. No compiler is imported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Its file, by the device that it is for.
LIBRARIES = {"cpu": "region.so", "cuda": "region_cuda.so"}

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def open_library(library: Path) -> Run:
    """The function of a library: tensors in, new tensors out. Raises RuntimeError when it does not load.

    By the container runners themselves; torch's own loader for packages would import the compiler to get there. One
    model in a container: calls come one at a time.
    """
    runners: Any = torch._C._aoti  # torch's stubs leave arguments out
    run: Run
    if library.name == LIBRARIES["cuda"]:
        # No folder of kernels, which are inside. Single-threaded it runs on the current stream and asks for no events,
        # so that a graph can capture it.
        run = runners.AOTIModelContainerRunnerCuda(str(library), 1, "cuda", "", True).run
        return _names_lack_of_memory(run)
    run = runners.AOTIModelContainerRunnerCpu(str(library), 1).run
    return run


def _names_lack_of_memory(run: Run) -> Run:
    """`run`, which tells by torch.OutOfMemoryError that the GPU has no memory: a library calls that a failure like any
    other, and torch's allocator counts."""
    known = _lacks_of_memory()

    def call(args: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal known
        try:
            return run(args)
        except RuntimeError as error:
            before, known = known, _lacks_of_memory()
            if known > before:
                raise torch.OutOfMemoryError(f"a compiled region found no memory: {error}") from error
            raise

    return call


def _lacks_of_memory() -> int:
    return int(torch.cuda.memory_stats().get("num_ooms", 0))
