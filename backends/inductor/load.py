"""The inductor region compiler, run side: a compiled region as a callable. No compiler is imported."""

from collections.abc import Callable
from pathlib import Path

import torch

from ingot.ir.errors import BackendError
from ingot.ir.plan import Executable

Region = Callable[..., list[torch.Tensor]]


def load(executable: Executable, directory: Path) -> Region:
    """The callable of a region: positional tensors in, a list of new tensors out.

    It checks nothing: whoever binds it compares dtypes, shapes and strides with the executable's signature.
    """
    library = directory / executable.files[0]
    try:
        # The container runner itself; torch's own loader for packages would import the compiler to get there. One
        # model in the container: calls come one at a time.
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    except RuntimeError as error:
        raise BackendError(f"the library does not load: {error}", where=str(library)) from error
    run = runner.run
    return lambda *args: run(list(args))
