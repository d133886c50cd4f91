"""The table of tolerances: what passes, what does not, and what is said."""

import math

import torch
from op_values import BF16, F32, every_dtype, ints

from ingot.ir.numerics.tolerances import compare


@every_dtype
def test_one_ulp_passes_and_a_wrong_digit_does_not(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.5, 1e-3, 300.0, 0.0], dtype=dtype)
    above = torch.nextafter(values, torch.tensor(math.inf, dtype=dtype))
    assert compare(above, values, dtype) is None
    assert compare(values, values.double(), dtype) is None
    assert "[3]" in str(compare(values * torch.tensor([1, 1, 1, 1.05, 1]).to(dtype), values, dtype))


def test_compare_says_what_is_wrong_and_where() -> None:
    expected = torch.ones(2, 3)
    found = expected.clone()
    found[1, 2], found[0, 1] = 1.5, 1.2
    problem = compare(found, expected, F32)
    assert problem == "max error 0.5 at [1, 2]: found 1.5, expected 1.0 ± 0.00011; 2 of 6 wrong"
    assert compare(found, expected, F32, factor=1e4) is None
    assert compare(found[0], expected, F32) == "shape [3], expected [2, 3]"
    assert compare(ints(1, 2), ints(1, 3), torch.int32) == "found 2, expected 3 at [1]; 1 of 2 wrong"
    assert compare(ints(1, 2), ints(1, 2), torch.int32) is None
    assert compare(torch.empty(0), torch.empty(0), F32) is None
    assert compare(torch.tensor(2.0), torch.tensor(2.0), F32) is None


def test_compare_never_passes_nan_and_no_lone_infinity() -> None:
    nan, inf, one = (torch.tensor([1.0, value]) for value in (math.nan, math.inf, 1.0))
    for found, expected in [(nan, nan), (nan, one), (one, nan), (inf, one), (one, inf), (-inf, inf), (inf, nan)]:
        assert compare(found, expected, F32, factor=1e9) is not None
    assert compare(inf, inf, F32) is None
    assert compare(-inf, -inf, BF16) is None
    assert compare(nan, nan, torch.int32) is not None
