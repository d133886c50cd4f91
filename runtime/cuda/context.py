"""Making a GPU ready while the host reads plans and weights."""

import torch


def start(device: torch.device) -> None:
    """Make the context, which takes some tenths of a second, and what the first product of matrices would wait for."""
    torch.empty(1, device=device)
    torch.cuda.current_blas_handle()
