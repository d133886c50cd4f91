"""GPTQ against a plain dense reference, its objective against rounding to nearest, and the bits that it stores."""

import pytest
import torch

from ingot.ir.errors import CalibrationError
from ingot.ir.formats import dequantize, find_format, quantize
from ingot.ir.formats.grid import Grid
from ingot.quantizing import gptq as module
from ingot.quantizing.gptq import DAMPING, gptq

FORMATS = ["int4_g32", "int4_g32_asym", "int8", "fp8", "nf4", "mxfp4", "nvfp4", "fp8_block128"]


def correlated(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Inputs whose channels have unequal sizes and depend on each other, as those of a model."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns // 4, columns, generator=generator)
    inputs = torch.randn(tokens, columns // 4, generator=generator) @ mix
    inputs += 0.3 * torch.randn(tokens, columns, generator=generator)
    return inputs * torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]


def weight_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7)) / columns**0.5


def dense_reference(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Optimal Brain Quantization in the paper's order: after each column, the inverse Hessian of the columns left."""
    columns = len(hessian)
    order = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    damped = hessian.double() + torch.eye(columns, dtype=torch.float64) * DAMPING * hessian.double().diagonal().mean()
    left, result = weight.double().clone(), torch.empty_like(weight)
    for done, column in enumerate(order):
        rest = order[done:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        result[:, column] = grid.nearest(left[:, column].float(), column)
        error = (left[:, column] - result[:, column].double()) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
    return result


@pytest.mark.parametrize("block", [128, 16])
def test_it_is_the_dense_reference(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    inputs, weight = correlated(400, 64), weight_of(24, 64)
    hessian, grid = inputs.T @ inputs, Grid.of(weight, find_format("int4_g32"))
    found, expected = gptq(weight, hessian, grid), dense_reference(weight, hessian, grid)
    # A value near the middle between two numbers may be rounded either way, and what follows then differs.
    assert float((found != expected).float().mean()) < 0.01


@pytest.mark.parametrize("name", FORMATS)
def test_it_beats_rounding_to_nearest_on_its_objective(name: str) -> None:
    inputs, weight, format = correlated(600, 128), weight_of(48, 128), find_format(name)
    grid = Grid.of(weight, format)
    error = [
        float((inputs @ (found - weight).T).square().sum())
        for found in (grid.nearest(weight), gptq(weight, inputs.T @ inputs, grid))
    ]
    assert error[1] < 0.7 * error[0]


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_to_nearest_on_a_grid_has_the_bits_of_quantize(name: str) -> None:
    weight, format = weight_of(48, 128), find_format(name)
    grid, expected = Grid.of(weight, format), quantize(weight, format)
    found = grid.stored(grid.nearest(weight))
    assert found.keys() == expected.keys()
    for part, tensor in expected.items():
        assert torch.equal(found[part].view(torch.uint8), tensor.view(torch.uint8)), part


@pytest.mark.parametrize("name", FORMATS)
def test_the_stored_parts_are_the_numbers_that_it_chose(name: str) -> None:
    inputs, weight, format = correlated(300, 128), weight_of(16, 128), find_format(name)
    hessian = inputs.T @ inputs
    grid = Grid.fitted(weight, format, hessian.diagonal())
    chosen = gptq(weight, hessian, grid)
    assert torch.equal(dequantize(grid.stored(chosen), format), chosen)


def test_a_fitted_grid_has_less_error() -> None:
    format = find_format("int4_g32")
    weight = weight_of(16, 64)
    weight[:, ::32] *= 4  # one large number in each group
    importance = torch.ones(64)
    importance[::32] = 0.01
    errors = [
        float(((grid.nearest(weight) - weight).square() * importance).sum())
        for grid in (Grid.of(weight, format), Grid.fitted(weight, format, importance))
    ]
    assert errors[1] < 0.5 * errors[0]


def test_columns_without_inputs_are_rounded_to_nearest() -> None:
    inputs, weight = correlated(300, 64), weight_of(8, 64)
    inputs[:, [3, 40]] = 0
    grid = Grid.of(weight, find_format("int4_g32"))
    found = gptq(weight, inputs.T @ inputs, grid)
    assert torch.equal(found[:, [3, 40]], grid.nearest(weight)[:, [3, 40]])


def test_fewer_tokens_than_columns() -> None:
    inputs, weight = correlated(5, 64), weight_of(8, 64)
    grid = Grid.of(weight, find_format("int4_g32"))
    assert bool(gptq(weight, inputs.T @ inputs, grid).isfinite().all())


def test_activations_that_are_not_finite() -> None:
    weight = weight_of(8, 64)
    hessian = torch.full((64, 64), float("inf"))
    with pytest.raises(CalibrationError, match="not finite"):
        gptq(weight, hessian, Grid.of(weight, find_format("int8")))
