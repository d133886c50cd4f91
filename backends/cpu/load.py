"""The cpu backend at run time: loads the built library of C++ kernels as Python functions, one per op."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ingot.backends.cpu.calls.attention import attention_ops
from ingot.backends.cpu.calls.dense import dense_ops
from ingot.backends.cpu.calls.kernels import INT, Kernels
from ingot.backends.cpu.calls.quant import quant_ops
from ingot.backends.cpu.calls.rope import rope_ops
from ingot.backends.cpu.calls.step import step_ops
from ingot.backends.cpu.calls.step_attention import step_attention_ops
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError
from ingot.ir.machine.load_context import LoadContext


def load_library(executable: Executable, directory: Path, context: LoadContext) -> Mapping[str, Callable[..., Any]]:
    """Load the library of C++ kernels, and return the function of each op by name, such as "ingot.linear".

    Functions of ops with states, such as a KV cache, update the state in place. They use torch's current number of
    threads. They do not check dtypes and strides, because the backend did so at compile time. Raises BackendError if
    the library does not load, and ArtifactError if another version of Ingot has built it with another interface.
    """
    path = directory / executable.files[0]
    try:
        kernels = Kernels(str(path))
        kernels.one("set_threads", INT)(torch.get_num_threads())
        dense = {**dense_ops(kernels), **quant_ops(kernels), **rope_ops(kernels)}
        return {**dense, **attention_ops(kernels), **step_attention_ops(), **step_ops(kernels)}
    except (OSError, AttributeError) as error:
        raise BackendError(f"the library does not load: {error}", where=str(path)) from error
