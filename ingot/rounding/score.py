"""The score of a fused form: its error as a multiple of the error that the contract for rounding allows."""

import torch

from ingot.ir.numerics.contracts import ROUNDING_FACTOR
from ingot.ir.numerics.tolerances import TOLERANCES


def score(separate: torch.Tensor, exact: torch.Tensor, fused: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of `fused` as a multiple of the allowed error. Above 1, the contract is broken.

    `fused` is the result of the fused form, and `separate` the result of separate calls. `exact` is the float64 result,
    and errors are distances from it. The allowed error is 1.25 times the largest error of `separate`, plus the
    tolerance of `dtype` (see `ingot.ir.numerics.contracts`).

    Tokens that overflow in separate calls are left out. If only the fused form overflows, the result is infinity.
    """
    judged = separate.flatten(1).isfinite().all(1) & exact.flatten(1).isfinite().all(1)
    if not bool(judged.any()):
        return 0.0
    before, truth, after = (one[judged].double().flatten(1) for one in (separate, exact, fused))
    table = TOLERANCES[dtype]
    allowed = ROUNDING_FACTOR * (before - truth).abs().max() + table.atol + table.rtol * truth.abs()
    return float(((after - truth).abs() / allowed).nan_to_num(nan=float("inf")).max())
