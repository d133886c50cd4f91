"""Fast access to torch's current stream and allocator, for launches on a GPU: a step has hundreds of them."""

from typing import Any

import torch


def current_stream(device: torch.device) -> int:
    """Return torch's current CUstream, without the Python object that torch.cuda.current_stream makes at each call."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def new_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor on the current GPU, allocated as in Inductor's code.

    This takes a third of the time of torch.empty, and does not release the GIL, which another thread would take.
    """
    guards: Any = torch._C._dynamo.guards  # torch's stubs leave the function out
    made: torch.Tensor = guards._empty_strided_cuda(shape, strides, dtype)
    return made
