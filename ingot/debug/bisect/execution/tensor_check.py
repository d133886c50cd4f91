"""Check whether a call's result is right: bit by bit if nothing is rounded, else by its error against float64.

The allowed error is based on that of the op's reference on the same inputs. A kernel may add in another order and round
elsewhere, but its errors must have the same size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ingot.ir.numerics.contracts import ROUNDING_FACTOR
from ingot.ir.numerics.tolerances import TOLERANCES

# The maximum of a result's root mean square error divided by the reference's, by the computing dtype. A wrong constant
# changes all elements a little. In bfloat16, each element may stay within its limit, but the mean shows the change.
# The largest ratios measured on healthy artifacts of all families in the tests are 1.8 in float32 and 1.1 in 16 bits.
# In float32, sums run in another order. In 16 bits, the one rounding of the result dominates.
_TYPICAL: Mapping[torch.dtype, float] = {
    torch.float64: 8.0,
    torch.float32: 8.0,
    torch.float16: 1.6,
    torch.bfloat16: 1.6,
}
# One rounding to nearest has an error of at most u / sqrt(3) in the root mean square over a binade; u is half of eps. A
# reference with a smaller error does not tighten the limit.
_ONE_ROUNDING = 0.5 / math.sqrt(3)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Wrong:
    """The description of a wrong tensor.

    `index` is the place of its worst element, with the number `found` there and the `expected` number. `text` describes
    the fault. `overflows` is True if a right number is too large for the dtype.
    """

    index: tuple[int, ...]
    found: float
    expected: float
    text: str
    overflows: bool = False

    def __str__(self) -> str:
        return self.text


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU, with the strides of the original."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype are equal bit by bit. So NaN equals a NaN with the same bits, and -0
    differs from 0."""
    return torch.equal(raw_bits(left), raw_bits(right))


def first_changed(before: torch.Tensor, after: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the first element whose bits differ between two tensors. At least one element must differ."""
    return _index((raw_bits(before) != raw_bits(after)).nonzero()[0])


def raw_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as integers, on the CPU."""
    bits = tensor.cpu()
    return bits if bits.dtype is torch.bool else bits.view(_BITS[bits.element_size()])


def _index(place: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in place)


def check_tensor(
    found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None
) -> Wrong | None:
    """Check the result of a call, `found`. Return what is wrong; None if it is right.

    `plain` is the reference's result in the call's dtypes. `exact` is the reference's result in float64. `dtype` is the
    dtype of lowest precision in the call and sets the tolerance. By default it is the dtype of the result.

    Where `exact` is infinite or NaN, the call's inputs are at fault. There, the error is not checked.
    """
    found = found.cpu()
    if found.shape != plain.shape or found.dtype is not plain.dtype:
        return Wrong((), math.nan, math.nan, f"{found.dtype} {list(found.shape)} in place of {list(plain.shape)}")
    if found.numel() == 0:
        return None
    if not found.is_floating_point():
        if torch.equal(found, plain):
            return None
        index = _index((found != plain).nonzero()[0])
        return _wrong(found, plain, index, f"{int((found != plain).sum())} of {found.numel()} wrong")
    dtype = dtype or found.dtype
    f, p, e = found.double(), plain.double(), exact.double()
    if (odd := _not_finite(f, p, e, found.dtype)) is not None:
        return odd
    usable = f.isfinite() & p.isfinite() & e.isfinite()
    error, own = torch.where(usable, f - e, 0.0).abs(), torch.where(usable, p - e, 0.0).abs()
    tolerance = TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])
    size = torch.where(usable, e, 0.0).abs()
    # The largest error: the same limit as for a pass that rounds.
    allowed = ROUNDING_FACTOR * own.max() + tolerance.atol + tolerance.rtol * size
    if bool((error > allowed).any()):
        index = _worst(error / allowed)
        count = int((error > allowed).sum())
        return _wrong(f, e, index, f"± {float(allowed[index]):.3g}; {count} of {found.numel()} wrong")
    ratio = typical_error(error, own, size, dtype)
    if ratio > _TYPICAL.get(dtype, _TYPICAL[torch.bfloat16]):
        text = f"the error, {_rms(error):.3g} in the mean, is {ratio:.3g} times the reference's"
        return _wrong(f, e, _worst(error), text)
    return None


def typical_error(error: torch.Tensor, own: torch.Tensor, size: torch.Tensor, dtype: torch.dtype) -> float:
    """Return how many times larger the errors of a result are than the errors of the reference.

    This is a ratio of root mean squares. `error` has the absolute errors of the result, and `own` those of the
    reference. `size` has the absolute right values. The reference's error counts as at least one rounding to `dtype`.
    The ratio is reduced for small tensors, since a mean of a few elements is unreliable.
    """
    eps = torch.finfo(dtype if dtype in TOLERANCES else torch.bfloat16).eps
    standard = max(_rms(own), _ONE_ROUNDING * eps * _rms(size), 1e-300)
    return _rms(error) / standard / (1 + 8 / math.sqrt(error.numel()))


def check_state(found: torch.Tensor, before: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> Wrong | None:
    """Check a state, such as a KV cache, after an update. Return what is wrong; None if it is right.

    Three faults are found. An element is wrong, or was not written. Or an element has changed although the update must
    keep it.

    `before` is the state before the update. `plain` is the state after the op's reference, in the state's dtype.
    `exact` is the state after the reference in float64.
    """
    found = found.cpu()
    kept = raw_bits(plain) == raw_bits(before)
    moved = raw_bits(found) != raw_bits(before)
    if bool((stray := kept & moved & ~_close(found, plain)).any()):
        index = _index(stray.nonzero()[0])
        return _wrong(found, before, index, f"which should stay; {int(stray.sum())} elements changed besides")
    still = torch.where(kept, torch.zeros_like(found), found)
    if not found.is_floating_point():
        return check_tensor(still, torch.where(kept, torch.zeros_like(plain), plain), exact)
    zero = torch.zeros_like(exact)
    wrong = check_tensor(still, torch.where(kept, torch.zeros_like(plain), plain), torch.where(kept, zero, exact))
    if wrong is not None and bool((~moved & ~kept).any()):
        missing = _index((~moved & ~kept).nonzero()[0])
        return _wrong(found, plain, missing, f"{int((~moved & ~kept).sum())} elements were not written")
    return wrong


def _close(found: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements of `found` that are within one rounding of the reference `plain`.

    `check_state` uses it for elements that a write to a state should leave unchanged. It accepts a rewritten element
    with nearly the old value.
    """
    if not found.is_floating_point():
        return torch.zeros_like(found, dtype=torch.bool)
    tolerance = TOLERANCES.get(found.dtype, TOLERANCES[torch.bfloat16])
    difference = (found.double() - plain.double()).abs()
    return difference <= tolerance.rtol * plain.double().abs()


def _not_finite(f: torch.Tensor, p: torch.Tensor, e: torch.Tensor, dtype: torch.dtype) -> Wrong | None:
    """Check the infinities and NaN of a result. Return what is wrong; None if nothing is.

    `f` is the result, `p` the reference's result in the call's dtypes, and `e` the reference's result in float64.
    """
    if bool((lost := ~f.isfinite() & e.isfinite()).any()):
        index = _index(lost.nonzero()[0])
        overflows = bool((~p.isfinite() & lost).any()) or bool((e.abs() > torch.finfo(dtype).max).any())
        return _wrong(f, e, index, f"{int(lost.sum())} of {f.numel()} are not finite", overflows=overflows)
    if bool((hidden := f.isfinite() & ~p.isfinite() & ~e.isfinite()).any()):
        index = _index(hidden.nonzero()[0])
        return _wrong(f, e, index, f"{int(hidden.sum())} of {f.numel()} are finite and must not be")
    infinite = f.isinf() & e.isinf()
    if bool((turned := infinite & (f != e)).any()):
        return _wrong(f, e, _index(turned.nonzero()[0]), "an infinity of the other sign")
    return None


def _worst(excess: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(excess.nan_to_num(nan=math.inf).argmax(), excess.shape))


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def _wrong(
    found: torch.Tensor, expected: torch.Tensor, index: tuple[int, ...], more: str, *, overflows: bool = False
) -> Wrong:
    left, right = float(found[index]), float(expected[index])
    place = "[" + ", ".join(map(str, index)) + "]"
    return Wrong(index, left, right, f"{left:.7g} at {place}, expected {right:.7g}; {more}", overflows)
