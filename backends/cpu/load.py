"""The cpu provider, run side: a built library as the ops that it computes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.backends.cpu.calls import Kernels, ops_of
from ingot.ir.errors import BackendError
from ingot.ir.plan import Executable


def load_library(executable: Executable, directory: Path) -> Mapping[str, Callable[..., Any]]:
    """The library's ops by their printed names; one with a state updates it in place."""
    path = directory / executable.files[0]
    try:
        return ops_of(Kernels(str(path)))
    except (OSError, AttributeError) as error:
        raise BackendError(f"the library does not load: {error}", where=str(path)) from error
