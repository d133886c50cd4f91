"""quant_linear by Triton kernels for few tokens, in each format, against the op's reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from quant_calls import check, drawn
from triton_schedules import TESTED, run_lowering, some

from ingot.backends.triton.lower.linear.matmul import LOWERINGS
from ingot.backends.triton.lower.quant import matvec
from ingot.backends.triton.lower.quant.tiles import QuantMatvecTiles
from ingot.ir import ops
from ingot.ir.formats import find_format

pytestmark = pytest.mark.one_in_file(3)

WEIGHT_ONLY = ("int8", "int8_tensor", "int8_g64", "int8_g128", "f8e4m3/*x*:f32", "f8e4m3/1x*:f32", "f8e4m3/128x128:f32")
FOUR_BITS = (
    *("int4_g32", "int4_g64", "int4_g128", "int4_g32_asym", "int4_g128_asym"),
    *("i4/1x*:f16/low_first", "u4/1x128:bf16:zeros/low_first"),
)
FLOATS = ("mxfp4", "nvfp4", "f4e2m1/1x*:f32/low_first", "f4e2m1/1x64:f8e4m3/1x*:f32/low_first")
SMALL_GROUPS = ("int8_g32", "u4/1x16:f16:zeros/low_first", "i4/1x16:f8e8m0/low_first", "f8e4m3/1x32:f8e8m0")
ORDERED = (
    *("u4/1x32:f16:zeros/low_first/ordered", "i8/1x64:f32/ordered"),
    *("f8e4m3/1x*:f32/ordered/x=f8e4m3:*", "i4/1x*:f32/low_first/ordered/x=i8:*"),
)
ROUNDED = (
    *("fp8", "fp8_per_channel_per_token", "fp8_block128", "int8_w8a8"),
    *("mxfp8", "f8e4m3/1x*:f32/x=f8e4m3:64:f8e8m0", "i4/1x128:f32/low_first/x=i8:128", "i4/1x*:f32/low_first/x=i8:*"),
    *("f8e4m3/*x*:f32/x=f8e4m3:static", "f8e4m3/1x*:f32/x=f8e4m3:*:bound1.5", "i4/1x128:f32/low_first/x=f8e4m3:*"),
)


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", some(10, [*WEIGHT_ONLY, *ROUNDED]))
def test_formats(name: str, dtype: torch.dtype) -> None:
    check(name, 3, 70, 256, dtype, bias=True)


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", some(8, [*FOUR_BITS, *FLOATS, *SMALL_GROUPS, *ORDERED]))
def test_four_bits_small_groups_and_other_orders(name: str, dtype: torch.dtype) -> None:
    check(name, 3, 70, 256, dtype)


# Columns and depths that are no multiples of a tile, smaller than one, and so deep that programs split them.
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize(
    ("name", "rows", "n", "k"),
    some(
        4,
        [
            (name, rows, n, k)
            for rows in (1, 13, 17, 64, 131)
            for name, n, k in (
                *(("int8", 37, 101), ("fp8_per_channel_per_token", 3, 8), ("fp8", 130, 2200), ("int8_w8a8", 257, 64)),
                *(("fp8_block128", 200, 384), ("int4_g128", 65, 1152), ("int4_g128_asym", 130, 384)),
                *(("f8e4m3/128x128:f32", 130, 640), ("int8_g128", 31, 1280)),
            )
        ],
    ),
)
def test_odd_shapes(name: str, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    check(name, rows, n, k, dtype, bias=rows % 2 == 0)


# One token has a kernel of its own. Several blocks of columns, the last one not whole, and rows that are no multiple of
# those of a program.
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize(
    ("name", "n", "k"),
    some(
        2,
        [
            *((name, 37, 544) for name in ("int8", "int8_w8a8", "fp8", "f8e4m3/*x*:f32/x=f8e4m3:static")),
            *((name, 70, 640) for name in (*WEIGHT_ONLY, *FOUR_BITS, *FLOATS, *SMALL_GROUPS, *ORDERED, *ROUNDED)),
            *((name, 5, 4096 + 384) for name in ("int4_g128", "int4_g128_asym", "int8_g128", "fp8_block128")),
            *((name, 130, 256) for name in ("f8e4m3/128x128:f32", "f8e4m3/32x64:f32", "i8/48x64:f32")),
        ],
    ),
)
def test_one_token(name: str, n: int, k: int, dtype: torch.dtype) -> None:
    check(name, 1, n, k, dtype, bias=True)


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", ["int4_g128_asym", "int8"])
def test_one_token_of_large_small_and_no_numbers(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 640, generator=torch.Generator().manual_seed(3))
    x[0, 5], x[0, 300] = 3000.0, -500.0  # among small ones
    x[0, 64:128], x[0, 128:160], x[0, 200] = 0.0, 1e-30, 1e-38
    check(name, 1, 37, 640, dtype, x=x.to(dtype))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["int4_g128", "int8", "fp8_per_channel_per_token", "int8_w8a8"])
def test_one_token_with_numbers_that_are_not_finite(name: str, bad: float) -> None:
    format = find_format(name)
    x, parts = drawn(format, 1, 8, 256, torch.float32)
    x[0, 9] = bad
    args: list[Any] = [x, *(parts.get(part) for part in ("weight", "scales", "zeros"))]
    kwargs = {"format": name}
    (found,) = run_lowering(ops.quant_linear, LOWERINGS["quant_linear"], args, kwargs, tokens=(1, 1), dims={"T": 1})
    assert bool(found.isnan().all())


def test_a_split_that_begins_after_the_last_column() -> None:
    """Nine blocks of columns are four splits of three."""
    check("int4_g128", 2, 65, 9 * 128, torch.float32)


@pytest.fixture
def without_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no assembly, which the kernel for one token uses for x of 16 bits."""
    monkeypatch.setattr(matvec, "one_token_elements", lambda form, *_: replace(form.elements, assembly=False))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", some(6, [*WEIGHT_ONLY, *FOUR_BITS, *FLOATS, *SMALL_GROUPS]))
@pytest.mark.usefixtures("without_assembly")
def test_one_token_of_16_bits(name: str) -> None:
    """x has two limbs, and in float32 three."""
    check(name, 1, 21, 384, torch.bfloat16)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("depth", (128, 320))
@pytest.mark.parametrize("n", (8, 9, 21, 37))
@pytest.mark.usefixtures("without_assembly")
def test_programs_of_several_groups_of_rows(n: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs share groups of four rows. The last groups may belong to one program, or end after the last row."""
    tiles = QuantMatvecTiles(rows=4, block_k=128, warps=1, held=7, programs=1)
    monkeypatch.setattr(matvec, "matvec_tiles", lambda *given: tiles)
    check("int4_g32", 1, n, depth, torch.bfloat16, bias=True, cores=2)
