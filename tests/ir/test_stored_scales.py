"""Which scales `check_scales` allows: each code of f8e8m0, and floats at the ends of the allowed range."""

import math

import pytest
import torch

from ingot.ir.stored.elements import check_scales

TINY = torch.finfo(torch.float32).tiny
POWERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def allowed(scales: torch.Tensor, *, zero: bool = False) -> bool:
    try:
        assert check_scales(scales, {"zero": zero}) is scales
    except ValueError:
        return False
    return True


def test_powers_of_two_up_to_the_65th_are_scales() -> None:
    for zero in (False, True):
        assert [allowed(one, zero=zero) for one in POWERS.split(1)] == [code <= 127 + 65 for code in range(256)]


@pytest.mark.parametrize(
    ("number", "message"), [(math.nan, "NaN or infinite"), (2.0**66, "larger than 2\\^65"), (2.0**-127, None)]
)
def test_one_power_among_others(number: float, message: str | None) -> None:
    scales = torch.ones(5, 7).index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(number))
    scales = scales.to(torch.float8_e8m0fnu)
    if message is None:
        assert allowed(scales) and allowed(scales.T)
        return
    with pytest.raises(ValueError, match=f"1 of 35 scales are {message}, the first at \\[3, 2\\]"):
        check_scales(scales, {"zero": False})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_floats(dtype: torch.dtype) -> None:
    good = torch.tensor([1.0, -2.0, 0.5, torch.finfo(dtype).tiny, torch.finfo(dtype).max])
    good = torch.tensor([max(abs(one), TINY) * math.copysign(1, one) for one in good.tolist()]).to(dtype)
    for start in (0, 2):  # with and without a negative one
        scales = good[start:]
        scales = scales[scales.double().isfinite()]
        assert allowed(scales) and allowed(scales, zero=True) and allowed(scales[:0])
        with_zero = torch.cat([scales.float(), torch.zeros(1)]).to(dtype)
        assert not allowed(with_zero) and allowed(with_zero, zero=True)
        wrong = [math.nan] if dtype is torch.float8_e4m3fn else [math.nan, math.inf, -math.inf]
        wrong += [TINY / 2, -TINY / 2] if dtype in (torch.bfloat16, torch.float32, torch.float64) else []
        for one in wrong:
            assert not allowed(torch.cat([scales.float(), torch.tensor([one])]).to(dtype), zero=True), one
