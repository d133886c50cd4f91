"""The run side of the cpu backend: loads a built library as ops."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ingot.backends.cpu.calls.attention import attention_ops
from ingot.backends.cpu.calls.dense import dense_ops
from ingot.backends.cpu.calls.kernels import INT, Kernels
from ingot.backends.cpu.calls.rope import rope_ops
from ingot.backends.cpu.calls.step import step_ops
from ingot.backends.cpu.calls.step_attention import step_attention_ops
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError
from ingot.ir.machine.load_context import LoadContext


def load_library(executable: Executable, directory: Path, context: LoadContext) -> Mapping[str, Callable[..., Any]]:
    """Load a library, and return its ops by printed name; an op with a state updates it in place.

    The ops use as many threads as torch does now. They do not check dtypes and strides: the claim in `emit` has. Raises
    BackendError if the library does not load.
    """
    path = directory / executable.files[0]
    try:
        kernels = Kernels(str(path))
        kernels.one("set_threads", INT)(torch.get_num_threads())
        dense = {**dense_ops(kernels), **rope_ops(kernels)}
        return {**dense, **attention_ops(kernels), **step_attention_ops(), **step_ops(kernels)}
    except (OSError, AttributeError) as error:
        raise BackendError(f"the library does not load: {error}", where=str(path)) from error
