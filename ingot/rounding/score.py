"""The score of a fused form: its error as a multiple of the error that the contract for rounding allows."""

import torch

from ingot.ir.numerics.contracts import ROUNDING_FACTOR
from ingot.ir.numerics.tolerances import TOLERANCES


def score(separate: torch.Tensor, exact: torch.Tensor, fused: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of `fused` as a multiple of the allowed error; above 1 the contract is broken.

    The allowed error is that of `ingot.ir.numerics.contracts`: 1.25 times the largest error of `separate`, the result
    of separate calls, plus the tolerance of `dtype`. Errors are distances from `exact`, the float64 result.

    Tokens that overflow in separate calls are left out. Infinity if the fused form alone overflows.
    """
    judged = separate.flatten(1).isfinite().all(1) & exact.flatten(1).isfinite().all(1)
    if not bool(judged.any()):
        return 0.0
    before, truth, after = (one[judged].double().flatten(1) for one in (separate, exact, fused))
    table = TOLERANCES[dtype]
    allowed = ROUNDING_FACTOR * (before - truth).abs().max() + table.atol + table.rtol * truth.abs()
    return float(((after - truth).abs() / allowed).nan_to_num(nan=float("inf")).max())
