"""The inductor region compiler, run side: a compiled region as a callable. No compiler is imported."""

from collections.abc import Callable
from pathlib import Path

import torch

from ingot.backends.inductor.library import open_library
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError
from ingot.ir.machine.load_context import LoadContext

Region = Callable[..., list[torch.Tensor]]


def load(executable: Executable, directory: Path, context: LoadContext) -> Region:
    """The callable of a region: positional tensors in, a list of new tensors out.

    It checks nothing: the code that binds it compares dtypes, shapes and strides with the executable's signature.
    """
    library = directory / executable.files[0]
    try:
        run = open_library(library)
    except RuntimeError as error:
        raise BackendError(f"the library does not load: {error}", where=str(library)) from error
    return lambda *args: run(list(args))
