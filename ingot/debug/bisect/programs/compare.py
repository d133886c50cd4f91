"""Compare two tensors that were computed in float64, and describe how they differ."""

import torch

from ingot.ir.numerics.contracts import MEANING_FACTOR
from ingot.ir.numerics.tolerances import TOLERANCES


def differs(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Compare two results that were computed in float64. Return how they differ beyond rounding, in words; None if they
    do not.

    Integers, booleans and infinities must be equal. NaN equals NaN, since it marks the elements of a state that were
    not written. The absolute tolerance grows with the largest finite number in `expected`, to allow for cancellation.
    """
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    if found.numel() == 0:
        return None
    left, right = found.detach().cpu(), expected.detach().cpu()
    if not left.is_floating_point() or not right.is_floating_point():
        wrong = left != right
        excess = wrong.double()
    else:
        left, right = left.double(), right.double()
        same = (left == right) | (left.isnan() & right.isnan())
        tolerance, finite = TOLERANCES[torch.float64], right[right.isfinite()]
        size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        error = (left - right).abs()
        excess = error / (MEANING_FACTOR * (tolerance.atol * size + tolerance.rtol * right.abs()))
        wrong = ~same & ~(excess <= 1)
        excess = torch.where(wrong, excess.nan_to_num(nan=float("inf")), 0.0)
    if not bool(wrong.any()):
        return None
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    return (
        f"{_number(left[worst])} at [{', '.join(map(str, worst))}], expected {_number(right[worst])}; "
        f"{int(wrong.sum())} of {wrong.numel()} differ"
    )


def _number(value: torch.Tensor) -> str:
    return f"{float(value):.6g}" if value.is_floating_point() else str(value.item())
