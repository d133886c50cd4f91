"""The loader of what was compiled, by backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.backends.cpu import load as cpu
from ingot.backends.flashinfer import load as flashinfer
from ingot.backends.inductor import load as inductor
from ingot.backends.triton import load as triton
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import ArtifactError
from ingot.ir.machine.load_context import LoadContext

LoadedCall = Callable[..., Sequence[torch.Tensor]]
Ops = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Loader:
    """What a backend loads: `executable`, the code of a region or of a call, as a callable; `library`, its kernels, as
    the ops that they compute by their printed names. None for what it does not emit."""

    executable: Callable[[Executable, Path, LoadContext], LoadedCall] | None = None
    library: Callable[[Executable, Path, LoadContext], Ops] | None = None


LOADERS: dict[str, Loader] = {
    "inductor": Loader(executable=inductor.load),
    "triton": Loader(executable=triton.load),
    "flashinfer": Loader(executable=flashinfer.load),
    "cpu": Loader(library=cpu.load_library),
}


def load_executable(executable: Executable, directory: Path, context: LoadContext) -> LoadedCall:
    """The callable of an executable whose files lie in `directory`. Raises ArtifactError for a backend that loads none,
    and BackendError for files that do not load."""
    load = LOADERS.get(executable.backend, Loader()).executable
    if load is None:
        raise _unknown("executable", executable, [name for name, one in LOADERS.items() if one.executable])
    return load(executable, directory, context)


def load_library(library: Executable, directory: Path, context: LoadContext) -> Ops:
    """The ops of a library whose files lie in `directory`. Raises as `load_executable` does."""
    load = LOADERS.get(library.backend, Loader()).library
    if load is None:
        raise _unknown("library", library, [name for name, one in LOADERS.items() if one.library])
    return load(library, directory, context)


def _unknown(kind: str, executable: Executable, known: Sequence[str]) -> ArtifactError:
    return ArtifactError(
        f"{kind} {executable.id} is of the unknown backend '{executable.backend}'", expected=", ".join(known)
    )
