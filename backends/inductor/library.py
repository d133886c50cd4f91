"""The library that a region is compiled into, and how it is called. No compiler is imported."""

from collections.abc import Callable
from pathlib import Path

import torch

# Its file, by the device that it is for.
LIBRARIES = {"cpu": "region.so", "cuda": "region_cuda.so"}


def open_library(library: Path) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The function of a library: tensors in, new tensors out. Raises RuntimeError when it does not load.

    By the container runners themselves; torch's own loader for packages would import the compiler to get there. One
    model in a container: calls come one at a time.
    """
    runners = torch._C._aoti
    if library.name == LIBRARIES["cuda"]:
        # No folder of kernels, which are inside. Single-threaded it runs on the current stream and asks for no events,
        # so that a graph can capture it.
        return runners.AOTIModelContainerRunnerCuda(str(library), 1, "cuda", "", True).run
    return runners.AOTIModelContainerRunnerCpu(str(library), 1).run
