"""Open and call the compiled library of a region, without importing a compiler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# The file name, by device.
LIBRARIES = {"cpu": "region.so", "cuda": "region_cuda.so"}

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def open_library(library: Path) -> Run:
    """Load the compiled library of a region (calls compiled together), and return a function that runs it.

    The function takes the list of input tensors, and returns a list of new tensors. It uses AOTInductor's container
    runners directly, because torch's package loader imports the compiler. The container holds one copy of the model,
    because calls never overlap. Raises RuntimeError if the library does not load.
    """
    runners: Any = torch._C._aoti  # torch's stubs leave arguments out
    run: Run
    if library.name == LIBRARIES["cuda"]:
        # No folder of kernels: they are in the library. The single-threaded mode runs on the current stream and queries
        # no events, so that a CUDA graph can capture it.
        run = runners.AOTIModelContainerRunnerCuda(str(library), 1, "cuda", "", True).run
        return _names_lack_of_memory(run)
    run = runners.AOTIModelContainerRunnerCpu(str(library), 1).run
    return run


def _names_lack_of_memory(run: Run) -> Run:
    """Return a function that calls `run`, but raises torch.OutOfMemoryError when the GPU is out of memory.

    `run` raises a plain RuntimeError in that case. The counter `num_ooms` of torch's allocator shows the cause.
    """
    known = _lacks_of_memory()

    def call(args: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal known
        try:
            return run(args)
        except RuntimeError as error:
            before, known = known, _lacks_of_memory()
            if known > before:
                raise torch.OutOfMemoryError(f"a compiled region ran out of GPU memory: {error}") from error
            raise

    return call


def _lacks_of_memory() -> int:
    return int(torch.cuda.memory_stats().get("num_ooms", 0))
