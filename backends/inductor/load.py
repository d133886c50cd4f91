"""The inductor backend at run time: loads a compiled region as a callable, without importing a compiler."""

from collections.abc import Callable
from pathlib import Path

import torch

from ingot.backends.inductor.library import open_library
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError
from ingot.ir.machine.load_context import LoadContext

Region = Callable[..., list[torch.Tensor]]


def load(executable: Executable, directory: Path, context: LoadContext) -> Region:
    """Load a compiled region (calls compiled together) from `directory`, and return a function that runs it.

    The function takes the input tensors as positional arguments, and returns a list of new tensors. It checks nothing:
    the caller compares dtypes, shapes and strides with the types in `executable`. Raises BackendError if the library
    does not load.
    """
    library = directory / executable.files[0]
    try:
        run = open_library(library)
    except RuntimeError as error:
        raise BackendError(f"the library does not load: {error}", where=str(library)) from error
    return lambda *args: run(list(args))
