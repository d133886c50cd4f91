"""GPTQ (arXiv 2210.17323): round a weight column by column, and let later columns compensate for the error."""

import torch

from ingot.ir.errors import CalibrationError
from ingot.ir.formats.grid import Grid

# The paper's choice (section 3.3, step 3): 1 % of the mean diagonal element.
DAMPING = 0.01
# Columns that are rounded before the others are updated. The paper's choice (section 3.3, step 2).
BLOCK = 128
# Widest weight whose Hessian is factored in float64: it and its factors then take 1.6 GB.
WIDEST_IN_FLOAT64 = 8192


def gptq(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return a matrix [N, K] on `grid` that is close to `weight` in its results: it has a small |X (Q - W)^T|^2.

    `weight` is float32 [N, K]. `hessian` is X^T X [K, K] for the inputs X [T, K]. Columns are rounded in order of their
    diagonal element, largest first, and keep their places. Columns without inputs are rounded to nearest. Raises
    CalibrationError if the Hessian has values that are not finite.
    """
    if not bool(hessian.isfinite().all()):
        raise CalibrationError("the activations of the calibration text are not finite", expected="finite activations")
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _factor(hessian[order][:, order])
    left, rounded = weight[:, order].clone(), torch.empty_like(weight)
    columns = weight.shape[1]
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = torch.empty_like(left[:, begin:end])
        for index in range(begin, end):
            column = left[:, index]
            place = int(order[index])
            rounded[:, place] = grid.nearest(column, place)
            errors[:, index - begin] = (column - rounded[:, place]) / factor[index, index]
            left[:, index:end] -= errors[:, index - begin, None] * factor[index, index:end]
        left[:, end:] -= errors @ factor[begin:end, end:]
    return rounded


def _factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian, as float32."""
    columns = len(hessian)
    wide = hessian.to(torch.float64 if columns <= WIDEST_IN_FLOAT64 else torch.float32)
    diagonal = wide.diagonal()
    mean = float(diagonal.mean()) or 1.0
    damping = DAMPING * mean
    for _ in range(6):  # up to 10^5 times the damping: rounding alone could still make a wide matrix indefinite
        damped = wide + torch.eye(columns, dtype=wide.dtype) * damping
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            inverse = torch.cholesky_inverse(lower)
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(failed):
                return upper.float()
        damping *= 10
    raise CalibrationError("the Hessian of a weight has no Cholesky factor", expected="activations of ordinary size")
