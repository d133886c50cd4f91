"""Loading of compiled code as Python functions, by the loaders in the table of backends."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.backends.reference.load import load_op
from ingot.backends.table import BACKENDS, find_entry
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import ArtifactError
from ingot.ir.machine.load_context import LoadContext

LoadedCall = Callable[..., Sequence[torch.Tensor]]
Ops = Mapping[str, Callable[..., Any]]


def load_executable(executable: Executable, directory: Path, context: LoadContext) -> LoadedCall:
    """Return the function of an executable: compiled code for one call, or for several fused calls. `directory` has its
    files. Raises ArtifactError if its backend has no executables, and BackendError if the files do not load."""
    entry = find_entry(executable.backend)
    if entry is None or entry.executable is None:
        raise _unknown("executable", executable, [name for name, one in BACKENDS.items() if one.executable])
    return entry.executable(executable, directory, context)


def load_library(library: Executable, directory: Path, context: LoadContext) -> Ops:
    """Return the functions of a backend's kernel library, by op name. `directory` has its files. Raises ArtifactError
    if the backend has no library, and BackendError if the files do not load."""
    entry = find_entry(library.backend)
    if entry is None or entry.library is None:
        raise _unknown("library", library, [name for name, one in BACKENDS.items() if one.library])
    return entry.library(library, directory, context)


def find_op(target: str, backend: str, library: Ops | None = None) -> Callable[..., Any]:
    """Return the function that computes an op with a backend.

    target    the op, such as "ingot.rms_norm"
    backend   the name of the backend
    library   the backend's kernel library: op -> function. It is searched first, then the backend's other functions

    If neither has the op, return the op's reference implementation. Raises BackendError for an unknown op.
    """
    found = (library or {}).get(target)
    entry = find_entry(backend)
    if found is None and entry is not None and entry.find_op is not None:
        found = entry.find_op(target)
    return found or load_op(target)


def _unknown(kind: str, executable: Executable, known: Sequence[str]) -> ArtifactError:
    return ArtifactError(
        f"{kind} {executable.id} is of the unknown backend '{executable.backend}'",
        expected=", ".join(known),
        hint="install the package that brings the backend, or compile the model again",
    )
