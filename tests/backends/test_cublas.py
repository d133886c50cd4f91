"""cublas: how a matmul of eight-bit elements is passed to torch, and what its backend claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType

from ingot.backends.cublas import emit, load
from ingot.backends.cublas.emit import Cublas
from ingot.ir import build, ops
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.formats import find_format, quantize
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType
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


def answer(
    format: str = "fp8",
    sizes: tuple[int, int] = (64, 512),
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    target: str = "sm_90",
) -> Yes | No:
    """The claim of `rounded_linear` with a weight of these sizes."""
    program, found = Program("main", Stage.FUSED, {"T": Dim("T", 1, 256)}), find_format(format)
    rule = found.activations
    assert rule is not None
    elements = torch.int8 if rule.element == "i8" else torch.float8_e4m3fn
    types = {
        "x": TensorType(elements, ("T", sizes[1])),
        "x_scales": TensorType(torch.float32, ("T", sizes[1] // rule.columns if rule.columns else 1)),
        **{part: one for part, one in found.types(sizes, torch.float32).items() if part in ("weight", "scales")},
        **({"bias": TensorType(dtype, (sizes[0],))} if bias else {}),
    }
    args = [program.add_input(name, one) for name, one in types.items()]
    node = build.call(program, ops.rounded_linear.overload, args, {"format": format, "dtype": dtype})
    return Cublas().claim([node], Target.named(target), BucketClass(name="extend", tokens=(65, 256)))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"format": "fp8_per_channel_per_token", "sizes": (16, 48), "bias": True, "target": "sm_100"},
        {"format": "f8e4m3/*x*:f32/x=f8e4m3:static"},
        {"format": "fp8_block128"},
    ],
    ids=str,
)
def test_what_is_claimed(asked: dict[str, Any]) -> None:
    assert isinstance(answer(**asked), Yes)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"format": "int8_w8a8"}, "no matmul of i8 elements on this target"),
        ({"target": "sm_80"}, "no matmul of f8e4m3 elements on this target"),
        ({"dtype": torch.float16}, "no matmul of f8e4m3 elements with a result of f16"),
        ({"format": "fp8_block128", "dtype": torch.float32}, "no matmul of f8e4m3 elements with a result of f32"),
        ({"sizes": (72, 512)}, "no matmul by 72 x 512 elements f8e4m3, which are no multiples of 16"),
        ({"sizes": (64, 520)}, "no matmul by 64 x 520 elements f8e4m3, which are no multiples of 16"),
        ({"format": "fp8_block128", "target": "sm_100"}, "no matmul with the scales of format fp8_block128"),
        ({"format": "fp8_block128", "bias": True}, "blocks of 128 columns are no multiple of 4, or there is a bias"),
        ({"format": "fp8_block128", "sizes": (64, 640)}, "blocks of 128 columns are no multiple of 4, or there is"),
    ],
    ids=str,
)
def test_what_is_refused(asked: dict[str, Any], reason: str) -> None:
    found = answer(**asked)
    assert isinstance(found, No) and found.reason.startswith(reason)
