"""Formats with rotations: their names, the weight that they stand for, and how a mesh may divide it."""

import pytest
import torch

from ingot.ir import ops
from ingot.ir.errors import OptionError
from ingot.ir.formats import Activations, Scales, dequantize, find_format, format_of, quantize
from ingot.ir.formats.rotation import rotated
from ingot.ir.types import Split

FORMAT = format_of("i8", (Scales(),), rotated_in=16, rotated_out=4)


def _turn(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(size))).Q


def test_names() -> None:
    assert FORMAT.name == "i8/1x*:f32/rotated_in=16/rotated_out=4"
    assert find_format(FORMAT.name) == FORMAT
    rule = Activations("f4e2m1", 32, torch.float8_e8m0fnu, factor=4 / 3)
    made = format_of("f4e2m1", (Scales(1, 32, dtype=torch.float8_e8m0fnu),), rule, "low_first", rotated_in=32)
    assert made.name == "f4e2m1/1x32:f8e8m0/low_first/rotated_in=32/x=f4e2m1:32:f8e8m0:factor1.3333333333333333"
    assert find_format(made.name) == made
    assert format_of("i8", (Scales(),), rotated_in=0).name == "int8"
    for text in (
        "i8/1x*:f32/rotated_in=0",
        "i8/1x*:f32/rotated_in=*",
        "i8/1x*:f32/rotated_in=x",
        "i8/1x*:f32/turned=4",
    ):
        with pytest.raises(OptionError, match="unknown weight format"):
            find_format(text)


def test_the_weight_includes_the_matrices() -> None:
    """x R S.T U + b is x W.T + b, with dense block-diagonal matrices in float64."""
    g = torch.Generator().manual_seed(0)
    parts = quantize(torch.randn(8, 32, generator=g), find_format("int8"))
    parts |= {"rotation_in": _turn(16), "rotation_out": _turn(4)}
    x, bias = torch.randn(3, 32, generator=g).double(), torch.randn(8, generator=g).double()
    stored = dequantize(parts, find_format("int8"), torch.float64)
    right, left = (torch.block_diag(*[_turn(size).double()] * 2) for size in (16, 4))
    assert torch.allclose(dequantize(parts, FORMAT, torch.float64), left.T @ stored @ right.T, atol=1e-14)
    weight, scales, turn_in, turn_out = (parts[part] for part in FORMAT.parts)
    call = (x, weight, scales, None, bias, None, None, None, None, turn_in, turn_out)
    found = ops.quant_linear.reference(*call, format=FORMAT.name)
    assert torch.allclose(found, x @ right @ stored.T @ left + bias, atol=1e-14)
    with pytest.raises(ValueError, match="has weight, scales, rotation_in, rotation_out, and weight, scales are given"):
        ops.quant_linear.fake(x, weight, scales, format=FORMAT.name)


def test_runs_are_row_vectors() -> None:
    x, turn = torch.arange(6.0).reshape(1, 6), torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert rotated(x, turn).tolist() == [[2, 0, 6, 2, 10, 4]]


def test_scales_are_multiplied_once_they_are_rounded() -> None:
    """The largest number 7 has the power of two 2**(2 - 2), and so the scale 4/3."""
    rule = Activations("f4e2m1", 32, torch.float8_e8m0fnu, factor=4 / 3)
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, :3] = torch.tensor([7.0, 1.0, -3.0])
    # 7 / (4/3) = 5.25, 1 / (4/3) = 0.75 and -3 / (4/3) = -2.25 are nearest to 6, to 1 (an even code) and to -2.
    assert torch.allclose(rule.rounded(x, None)[0, :3], torch.tensor([6.0, 1.0, -2.0]).double() * 4 / 3)


def test_blocks_stay_together() -> None:
    assert FORMAT.granule(0) == 4 and FORMAT.granule(1) == 16
    assert FORMAT.obstacle((8, 32)) is None
    assert FORMAT.obstacle((6, 32)) == "6 rows are no multiple of the 4 that are rotated together"
    assert FORMAT.obstacle((8, 40)) == "40 columns are no multiple of the 16 that are rotated together"
    split = FORMAT.split(Split("tp", 1, (), 1), "weight")
    assert split is not None and split.unit == 16
    assert FORMAT.split(Split("tp", 1, (), 1), "rotation_in") is None


def test_the_weight_alone_does_not_determine_a_matrix() -> None:
    with pytest.raises(ValueError, match="does not determine rotation_in and rotation_out"):
        quantize(torch.randn(8, 32), FORMAT)
