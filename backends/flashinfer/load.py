"""The flashinfer backend, run side: calls what was built. Neither FlashInfer nor a compiler is needed."""

from collections.abc import Callable
from pathlib import Path

import torch

from ingot.backends.flashinfer.library import Library
from ingot.ir.artifact.plan import Executable
from ingot.ir.machine.load_context import LoadContext


def load(executable: Executable, directory: Path, context: LoadContext) -> Callable[..., list[torch.Tensor]]:
    """The callable of an executable. Raises BackendError for a library that does not load, or not onto the GPU."""
    library = Library(directory / executable.files[0])
    library.prepare()
    return library
