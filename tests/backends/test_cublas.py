"""cublas: how a matmul of eight-bit elements is passed to torch, and what its backend claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType

from ingot.backends.cublas import emit, load
from ingot.ir import ops
from ingot.ir.formats import find_format, quantize
from ingot.passes.dry_run import peak_bytes


def scaled_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    x_recipe: ScalingType,
    scales: torch.Tensor,
    recipe: ScalingType,
    *,
    bias: torch.Tensor | None,
    output_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """As torch's on compute capability 9.0, with its conditions on shapes and strides."""
    (rows, depth), columns = x.shape, weight.shape[1]
    assert x.is_contiguous() and weight.t().is_contiguous() and depth % 16 == columns % 16 == 0
    if recipe is ScalingType.RowWise:
        assert x_recipe is recipe and x_scales.shape == (rows, 1) and scales.shape == (1, columns)
        assert x_scales.is_contiguous() and scales.is_contiguous()
        wide, matrix = x.float() * x_scales, weight.float() * scales
    else:
        assert (x_recipe, recipe) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        assert rows % 4 == 0 and not use_fast_accum and bias is None
        assert x_scales.shape == (rows, depth // 128) and x_scales.stride() == (1, rows)
        assert scales.shape == (depth // 128, -(-columns // 128)) and scales.stride() == (1, depth // 128)
        wide = x.float() * x_scales.repeat_interleave(128, 1)
        blocks = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        matrix = weight.float() * blocks[:, :columns]
    result = wide @ matrix
    return (result if bias is None else result + bias.float()).to(output_dtype)


@pytest.mark.parametrize("tokens", [1, 37, 64, 257])
@pytest.mark.parametrize("format", ["fp8", "fp8_per_channel_per_token", "fp8_block128"])
def test_a_matmul_of_eight_bit_elements(format: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "scaled_mm", scaled_mm)
    multiply, found = load.find_op("ingot.rounded_linear"), find_format(format)
    assert multiply is not None and found.activations is not None
    g = torch.Generator().manual_seed(tokens)
    parts = quantize(torch.randn(208, 512, generator=g) / 32, found)
    rows = found.activations.elements(torch.randn(tokens, 512, generator=g), None)
    bias = () if found.activations.columns else (torch.randn(208, generator=g).bfloat16(),)
    args: list[Any] = [*rows, *parts.values(), *bias]
    kwargs = {"format": format, "dtype": torch.bfloat16}
    expected = ops.rounded_linear.reference(*args, **kwargs)
    result = multiply(*args, **kwargs)
    assert result.is_contiguous() and result.shape == expected.shape
    # A sum in another order turns a few results to a neighbour.
    assert (result != expected).float().mean() < 0.01 and torch.allclose(result.float(), expected.float(), rtol=0.01)
    meta = [arg.to("meta") for arg in args]
    copied = tokens * (512 + 4 * 4) if found.activations.columns else 208 * 4
    assert peak_bytes(emit._rounded_linear, meta, kwargs) >= tokens * 208 * 2 + copied
