"""Rotations: matmuls by a small matrix, block by block, that spread outliers before numbers are rounded."""

import torch


def rotated(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., K] with each run of G elements multiplied by `matrix` [G, G], in the dtype of x.

    A run is a row vector, so the result of a run r is `r @ matrix`. Methods that rotate choose orthogonal matrices,
    such as Hadamard matrices (QuaRot, arXiv 2404.00456), but any matrix is accepted.
    """
    runs: torch.Tensor = x.unflatten(-1, (-1, matrix.shape[0])) @ matrix.to(x.dtype)
    return runs.flatten(-2)
