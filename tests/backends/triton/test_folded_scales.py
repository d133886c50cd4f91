"""Scales that are multiplied into elements of f4e2m1: the products are exact in bfloat16."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from quant_calls import drawn
from triton_schedules import DEVICE

from ingot.backends.triton.kernels.quant.constants import Elements
from ingot.backends.triton.kernels.quant.elements import factors_of
from ingot.backends.triton.lower.linear.weight import stored_weight
from ingot.backends.triton.lower.quant.form import StoredForm, form_of, with_folded_scales
from ingot.backends.triton.schedule import Value
from ingot.ir.formats import ELEMENTS, find_format
from ingot.ir.stored.elements import check_scales
from ingot.ir.types import TensorType

CODES = torch.arange(16)
POWERS = torch.arange(256, dtype=torch.uint8)


@triton.jit
def _factors(out, scales, N: tl.constexpr, ELEMENTS_OF: tl.constexpr):
    n = tl.arange(0, N)
    factor = factors_of(tl.load(scales + n), ELEMENTS_OF, tl.bfloat16)
    tl.store(out + n, factor.to(tl.int16, bitcast=True))


def read(name: str, depth: int, dtype: torch.dtype) -> tuple[StoredForm, StoredForm]:
    """The form of a weight with `depth` columns, and the one in which scales are folded."""
    format = find_format(name)
    _, parts = drawn(format, 1, 8, depth, dtype)
    values = {part: Value(TensorType(one.dtype, tuple(one.shape)), input=0) for part, one in parts.items()}
    form = form_of(stored_weight(format, values), dtype, 90)
    return form, with_folded_scales(form, format, depth, dtype)


def factors(scales: torch.Tensor, elements: Elements) -> torch.Tensor:
    out = torch.empty(scales.shape, dtype=torch.int16, device=DEVICE)
    _factors[(1,)](out, scales.to(DEVICE), len(scales), elements)
    return out.cpu().view(torch.bfloat16)


def products(scales: torch.Tensor, elements: Elements) -> torch.Tensor:
    """All elements times all scales, as the kernel multiplies them: [codes, scales] bf16, times 2**fold in float64."""
    if elements.assembly:
        bits = ((CODES & 7) << 6 | (CODES >> 3) << 15).to(torch.int32)
        numbers = bits.to(torch.uint16).view(torch.bfloat16)
    else:
        numbers = torch.tensor(ELEMENTS["f4e2m1"].table, dtype=torch.bfloat16)
    exact = numbers.double()[:, None] * factors(scales, elements).double()[None, :]
    return exact.to(torch.bfloat16).double() * 2.0**elements.fold


@pytest.mark.parametrize("assembly", [True, False])
def test_powers_of_two(assembly: bool) -> None:
    """The scales from 2^-62 to 2^65, and NaN for what is larger."""
    elements = replace(read("mxfp4", 64, torch.bfloat16)[1].elements, assembly=assembly)
    numbers = torch.tensor(ELEMENTS["f4e2m1"].table, dtype=torch.float64)
    expected = numbers[:, None] * 2.0 ** (POWERS.double() - 127)
    assert torch.equal(products(POWERS, elements)[:, 65:193], expected[:, 65:193])
    if assembly:
        assert bool(factors(POWERS, elements)[193:].isnan().all())


@pytest.mark.parametrize("assembly", [True, False])
def test_scales_of_eight_bits(assembly: bool) -> None:
    elements = replace(read("f4e2m1/1x64:f8e4m3/low_first", 64, torch.bfloat16)[1].elements, assembly=assembly)
    scales = POWERS.view(torch.float8_e4m3fn)
    numbers = torch.tensor(ELEMENTS["f4e2m1"].table, dtype=torch.float64)
    expected = numbers[:, None] * scales.double()
    assert torch.equal(products(scales, elements).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    ("name", "depth", "dtype", "block"),
    [
        ("mxfp4", 2880, torch.bfloat16, 64),
        ("mxfp4", 4096, torch.bfloat16, 128),
        ("mxfp4", 96, torch.float32, 32),
        ("nvfp4", 144, torch.bfloat16, 16),
        ("mxfp4", 4096, torch.float16, None),  # products do not fit
        ("int4_g32", 4096, torch.bfloat16, None),
        ("f4e2m1/1x*:f32/low_first", 4096, torch.bfloat16, None),
    ],
)
def test_where_scales_are_folded(name: str, depth: int, dtype: torch.dtype, block: int | None) -> None:
    form, folded = read(name, depth, dtype)
    if block is None:
        assert folded == form and form.elements.fold == -1
    else:
        assert (folded.block_k, folded.elements.chunk, folded.elements.fold >= 0) == (block, block, True)


def test_larger_scales_are_refused() -> None:
    scales = torch.tensor([127, 192], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert check_scales(scales, {"zero": False}) is scales
    scales = torch.tensor([127, 193], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(ValueError, match=r"1 of 2 scales are larger than 2\^65, the first at \[1\]"):
        check_scales(scales, {"zero": False})
