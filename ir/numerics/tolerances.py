"""The table of tolerances: the allowed distance of a computed tensor from its reference, per dtype.

Tests of backends and passes call `compare`, and never set their own `atol`. A test that sums more terms than the table
assumes passes a `factor` and says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """The limit of each element's error: `|found - expected| <= atol + rtol * |expected|`.

    It assumes numbers around 1, as activations have.
    """

    atol: float
    rtol: float


# The unit roundoff u of a dtype with p bits of mantissa (the hidden one included) is 2^-p: the relative error of one
# rounding to nearest. Two correct results on either side of a tie differ by one ulp, which is up to 2u.
TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    # u = 2^-53 = 1.1e-16. Oracles only. Sums of a few thousand terms in another order stay below 10^3 u.
    torch.float64: Tolerance(atol=1e-13, rtol=1e-12),
    # u = 2^-24 = 6.0e-8. Sums are accumulated in float32 itself, so the order of additions matters: rtol is 1700 u.
    # atol covers results near zero by cancellation: 10^3 terms of size one, added in another order, differ by about
    # 1e-5.
    torch.float32: Tolerance(atol=1e-5, rtol=1e-4),
    # u = 2^-11 = 4.9e-4. Accumulated in float32, so only the output is rounded: rtol is 4 u, one ulp and as much again
    # for an inner rounding (the normed value of rms_norm). atol is 2^-12: the same near zero, size one.
    torch.float16: Tolerance(atol=2.5e-4, rtol=2e-3),
    # u = 2^-8 = 3.9e-3. As float16, but rtol is 2.6 u only: one ulp passes and two do not. Eight bits show so little
    # that a wider bound would hide a wrong epsilon or a missing cast.
    torch.bfloat16: Tolerance(atol=1e-3, rtol=1e-2),
}


def compare(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, factor: float = 1.0) -> str | None:
    """Return as text how `found` differs from `expected` more than the tolerance of `dtype`; None if it does not.

    `dtype` is the dtype in which `found` was computed. `expected` may be wider. `factor` multiplies the tolerance. A
    dtype without a tolerance (integers, bool, float8) must agree exactly. NaN always differs, even from NaN. An
    infinity agrees only with the same infinity.
    """
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    if found.numel() == 0:
        return None
    if dtype not in TOLERANCES and not (found.is_floating_point() or expected.is_floating_point()):
        return _compare_exactly(found.cpu(), expected.cpu())
    tolerance = TOLERANCES.get(dtype, Tolerance(0.0, 0.0))
    left, right = found.detach().cpu().double(), expected.detach().cpu().double()
    for name, tensor in (("found", left), ("expected", right)):
        if bool(tensor.isnan().any()):
            return (
                f"NaN in {name} at {_first(tensor.isnan())}, and {int(tensor.isnan().sum())} of {tensor.numel()} in all"
            )
    same = left == right  # including infinities
    error = torch.where(same, 0.0, (left - right).abs())
    allowed = factor * (tolerance.atol + tolerance.rtol * right.abs())
    # An infinite `expected` allows an infinite error, so infinities are wrong wherever they are not the same.
    wrong = ~same & ~((error <= allowed) & right.isfinite())
    if not bool(wrong.any()):
        return None
    excess = torch.where(wrong, error / allowed, 0.0).nan_to_num(nan=float("inf"))
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    return (
        f"max error {float(error[worst]):.3g} at {_place(worst)}: found {float(left[worst])!r}, "
        f"expected {float(right[worst])!r} ± {float(allowed[worst]):.3g}; {int(wrong.sum())} of {wrong.numel()} wrong"
    )


def _compare_exactly(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    wrong = found != expected
    if not bool(wrong.any()):
        return None
    place = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"found {found[place].item()!r}, expected {expected[place].item()!r} at {_place(place)}; "
        f"{int(wrong.sum())} of {wrong.numel()} wrong"
    )


def _first(mask: torch.Tensor) -> str:
    return _place(tuple(int(i) for i in mask.nonzero()[0]))


def _place(index: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, index)) + "]"
