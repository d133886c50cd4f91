"""When logits in 16 bits agree with those of another implementation: they are as near to float32 as its own."""

import torch

from ingot.ir.numerics.tolerances import TOLERANCES

# What a rewrite may add to rounding is 1.25 (architecture, section 3); two runs of equal rounding noise, over the few
# logits of a test, differ by about as much again.
NOISE = 1.25 * 1.25


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def disagreement(found: torch.Tensor, expected: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> str | None:
    """How `found`, computed in `dtype`, is further from `expected` than it may be, in words; None when it is not.

    `expected` are the other implementation's logits in float32 and `theirs` those in `dtype`, of the same weights. The
    root mean square of the error may be that of `theirs` with NOISE, and the tolerance of `dtype`.
    """
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    tolerance, size = TOLERANCES[dtype], rms(expected)
    allowed = NOISE * rms(theirs - expected) + tolerance.atol + tolerance.rtol * size
    error = rms(found - expected)
    print(f"{dtype}: logits of size {size:.2e} with an error of {error:.2e}, theirs {rms(theirs - expected):.2e}")
    return None if error <= allowed else f"the error in {dtype} is {error:.2e}, at most {allowed:.2e} may be"
