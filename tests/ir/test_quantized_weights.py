"""A quantized weight lies within half a step of the original by every format, and what is farther off is found."""

from collections.abc import Callable

import pytest
import torch

from ingot.ir.formats import FORMATS, quantize
from ingot.ir.numerics.quantized_weights import kl_divergence, weight_breach

Parts = dict[str, torch.Tensor]


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of different sizes, one of zeros, one that is all positive, an outlier; others with the zero anywhere."""
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(200, 256, generator=generator) + 2 * torch.randn(200, 1, generator=generator)
    tensor[:12] = torch.randn(12, 256, generator=generator) * torch.logspace(-3, 1, 12)[:, None]
    tensor[3], tensor[4], tensor[5, 7] = 0, tensor[4].abs() + 1, 40
    return tensor.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_keeps_it(name: str, dtype: torch.dtype) -> None:
    parts = quantize(weights(dtype), FORMATS[name])
    assert weight_breach(weights(dtype), parts, FORMATS[name]) is None


def _first_scale(factor: float) -> Callable[[Parts], None]:
    def edit(parts: Parts) -> None:
        parts["scales"][0, 0] *= factor

    return edit


def _element(parts: Parts) -> None:
    parts["weight"][6, 9] ^= 2  # of the low element where a byte has two


def _moved_zeros(parts: Parts) -> None:
    if "zeros" in parts:
        parts["zeros"][4] += 2
    else:
        parts["weight"][4] -= 2


@pytest.mark.parametrize("edit", [_first_scale(1.02), _first_scale(0.9), _element, _moved_zeros])
@pytest.mark.parametrize("name", ["int8", "int8_tensor", "int8_g64", "int4_g32_asym"])
def test_a_wrong_part_is_found(name: str, edit: Callable[[Parts], None]) -> None:
    format, parts = FORMATS[name], quantize(weights(), FORMATS[name])
    edit(parts)
    problem = weight_breach(weights(), parts, format)
    assert problem is not None and problem.text.startswith(("a value is off by ", "a step is "))
    assert problem.error > problem.allowed or problem.text.startswith("a step is ")


def test_a_lossless_format_loses_nothing() -> None:
    edited = weights(torch.bfloat16)
    edited[6, 9] *= 1.01
    problem = weight_breach(weights(torch.bfloat16), {"weight": edited}, FORMATS["plain"])
    assert problem is not None and problem.text.endswith(", but must be exact") and problem.error > 0


def test_a_step_may_not_be_coarser_than_the_range_needs() -> None:
    """Twice the weights have twice the step; their halves are as near as half of that allows."""
    format, parts = FORMATS["int8"], quantize(2 * weights(), FORMATS["int8"])
    half = torch.round(weights() / parts["scales"]).to(torch.int8)
    problem = weight_breach(weights(), {**parts, "weight": half}, format)
    assert problem is not None and "but the weights' range needs" in problem.text
    assert problem.relative_error == pytest.approx(1.0)


def test_kl_divergence() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    other = torch.tensor([[0.0, torch.log(torch.tensor(3.0))], [1.0, 3.0]])
    expected = 0.5 * (torch.log(torch.tensor(0.5 / 0.25)) + torch.log(torch.tensor(0.5 / 0.75)))  # of the first row
    assert kl_divergence(logits, other) == pytest.approx(float(expected) / 2)
    assert kl_divergence(logits, logits) == 0.0
