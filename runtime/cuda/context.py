"""Initialization of a GPU while the host reads plans and weights."""

import torch

from ingot.ir.errors import TargetError


def start(device: torch.device) -> None:
    """Create the CUDA context and the cuBLAS handle now, so that the first matmul does not wait for them. This takes
    some tenths of a second. Raises TargetError if the GPU exists and cannot be used."""
    try:
        torch.empty(1, device=device)
        torch.cuda.synchronize(device)  # makes the context current in this thread too, as cuBLAS requires
        torch.cuda.current_blas_handle()
    except RuntimeError as error:  # full memory, exclusive use by another process, a driver fault
        raise TargetError(
            f"the GPU cannot be used: {str(error).partition(chr(10))[0]}",
            expected="a GPU with free memory that this process may use",
            hint="check the GPU with nvidia-smi",
        ) from error
