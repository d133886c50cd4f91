"""The flashinfer backend at run time: loads the built library, without FlashInfer or a compiler."""

from collections.abc import Callable
from pathlib import Path

import torch

from ingot.backends.flashinfer.library import Library
from ingot.ir.artifact.plan import Executable
from ingot.ir.machine.load_context import LoadContext


def load(executable: Executable, directory: Path, context: LoadContext) -> Callable[..., list[torch.Tensor]]:
    """Load a built attention library from `directory`, and return a callable that computes `paged_attention`.

    The callable returns a list of one tensor. Raises BackendError if the library or its GPU code does not load.
    """
    library = Library(directory / executable.files[0])
    library.prepare()
    return library
