"""dequantize by its Triton kernel, in each format, against the op's reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_schedules import DEVICE, run_lowering, some

from ingot.backends.triton.lower.quant import dequantize
from ingot.backends.triton.lower.quant.dequantize import LOWERINGS
from ingot.backends.triton.lower.quant.form import StoredForm, form_of
from ingot.backends.triton.lower.refused import Refused
from ingot.ir import ops
from ingot.ir.formats import PARTS, find_format, quantize

BYTES = (
    *("int8", "int8_tensor", "int8_g32", "int8_g64", "int8_g128", "f8e4m3/*x*:f32", "f8e4m3/1x*:f32"),
    *("f8e4m3/128x128:f32", "f8e4m3/32x64:f32", "f8e4m3/1x32:f8e8m0", "i8/48x64:f32", "u8/1x256:f16:zeros"),
)
FOUR_BITS = (
    *("int4_g32", "int4_g64", "int4_g128", "int4_g32_asym", "int4_g128_asym", "mxfp4", "i4/1x16:f8e8m0/low_first"),
    *("i4/1x*:f16/low_first", "u4/1x128:bf16:zeros/low_first", "u4/1x16:f16:zeros/low_first"),
    *("f4e2m1/1x*:f32/low_first", "nvfp4", "f4e2m1/1x64:f8e4m3/1x*:f32/low_first"),
)
# The interpreter does not round to bf16 as a GPU does.
DTYPES = (torch.float16, torch.float32) if DEVICE == "cpu" else (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _without_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no assembly, by which the kernel converts elements for results of 16 bits."""

    def plain(*given: Any) -> StoredForm:
        form = form_of(*given)
        return replace(form, elements=replace(form.elements, assembly=False))

    if DEVICE == "cpu":
        monkeypatch.setattr(dequantize, "form_of", plain)


def check(name: str, n: int, k: int, dtype: torch.dtype) -> None:
    """The kernel computes as the reference does, in float32, and rounds once: the bits are equal."""
    generator = torch.Generator().manual_seed(n + k)
    parts = quantize(torch.randn(n, k, generator=generator) * k**-0.5, find_format(name))
    args: list[Any] = [parts.get(part) for part in PARTS[:6]]
    kwargs = {"format": name, "dtype": dtype}
    (found,) = run_lowering(ops.dequantize, LOWERINGS["dequantize"], args, kwargs, tokens=(65, 512))
    expected = ops.dequantize.reference(*args, **kwargs)
    assert found.dtype is dtype and torch.equal(found.cpu(), expected), name


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", some(10, [*BYTES, *FOUR_BITS]))
def test_formats(name: str, dtype: torch.dtype) -> None:
    check(name, 131, 768, dtype)


# One row, fewer columns than a tile has, and last tiles that are not whole.
@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "n", "k"),
    some(
        4,
        [
            *(("int8", 37, 101), ("int8", 3, 8), ("int8_tensor", 1, 1031), ("f8e4m3/1x*:f32", 130, 2200)),
            *(("f8e4m3/128x128:f32", 200, 640), ("int8_g64", 1, 64), ("int4_g32", 1, 32), ("int4_g32", 9, 544)),
            *(("int4_g128_asym", 65, 1152), ("mxfp4", 130, 96), ("u4/1x16:f16:zeros/low_first", 5, 80)),
        ],
    ),
)
def test_odd_shapes(name: str, n: int, k: int, dtype: torch.dtype) -> None:
    check(name, n, k, dtype)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("u4/1x32:f16:zeros/low_first/ordered", "no kernel that writes columns in another order"),
        ("u4/1x32:f32:offsets/low_first", "no kernel for offsets"),
        ("i8/1x48:f32", "no kernel for groups of 48 columns"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(name: str, reason: str) -> None:
    format = find_format(name)
    parts = quantize(torch.ones(4, 96), replace(format, ordered=False))
    if format.ordered:
        parts["order"] = torch.arange(96, dtype=torch.int32)
    args = [parts.get(part) for part in PARTS[:6]]
    kwargs = {"format": name, "dtype": torch.bfloat16}
    with pytest.raises(Refused, match=f"format {format.name}: {reason}".replace("*", r"\*")):
        run_lowering(ops.dequantize, LOWERINGS["dequantize"], args, kwargs)
