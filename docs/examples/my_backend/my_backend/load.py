"""The load side: opens the library with ctypes. It imports no compiler, and nothing of the compile side."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from ingot.ir.artifact.plan import Executable
from ingot.ir.machine.load_context import LoadContext


def load(executable: Executable, directory: Path, context: LoadContext) -> Callable[..., list[torch.Tensor]]:
    """Return a function of the gate and up [tokens, width] that returns the product, a new tensor."""
    function = ctypes.CDLL(str(directory / executable.files[0])).gate
    function.argtypes, function.restype = [*[ctypes.c_void_p] * 3, ctypes.c_int64], None

    def run(gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
        out = torch.empty(gate.shape, dtype=gate.dtype)
        function(out.data_ptr(), gate.data_ptr(), up.data_ptr(), gate.shape[0])
        return [out]

    return run
