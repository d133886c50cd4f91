"""What code that launches on a GPU needs of torch, by torch's shortest ways: a step has hundreds of launches."""

from typing import Any

import torch


def current_stream(device: torch.device) -> int:
    """The CUstream that torch launches on, without the object that torch.cuda.current_stream makes at each call."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def new_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the current GPU, which holds anything. As Inductor's code makes its buffers: a third of torch.empty's
    time passes, and the interpreter's lock is not let go, which another thread would take."""
    guards: Any = torch._C._dynamo.guards  # torch's stubs leave the function out
    made: torch.Tensor = guards._empty_strided_cuda(shape, strides, dtype)
    return made
