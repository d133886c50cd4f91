"""Making a GPU ready while the host reads plans and weights."""

import torch

from ingot.ir.errors import TargetError


def start(device: torch.device) -> None:
    """Make the context, which takes some tenths of a second, and what the first product of matrices would wait for.

    Raises TargetError for a GPU that is there and cannot be used.
    """
    try:
        torch.empty(1, device=device)
        torch.cuda.synchronize(device)  # the context is there for this thread too, which cuBLAS asks for
        torch.cuda.current_blas_handle()
    except RuntimeError as error:  # its memory is full, it is another process's alone, its driver is at fault
        raise TargetError(
            f"the GPU cannot be used: {str(error).partition(chr(10))[0]}",
            expected="a GPU with free memory that this process may use",
            hint="see what nvidia-smi says of it",
        ) from error
