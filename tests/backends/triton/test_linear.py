"""linear by Triton kernels: one token, and a tile of tokens, against the op's reference."""

from typing import Any

import pytest
import torch
from triton_schedules import DEVICE, TESTED, run_lowering

from ingot.backends.triton.lower.linear import LOWERINGS
from ingot.ir import ops
from ingot.ir.tolerances import compare


def _check(args: tuple[Any, ...], dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    (found,) = run_lowering(ops.linear, LOWERINGS["linear"], args, {}, tokens=tokens, dims={"T": args[0].shape[0]})
    expected = ops.linear.reference(*(argument.double() for argument in args))
    # A result is a sum of K products of size one, which is of the size of sqrt(K).
    assert (problem := compare(found, expected, dtype, factor=args[1].shape[1] ** 0.5)) is None, problem


def _drawn(dtype: torch.dtype, seed: int, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("tokens", [(1, 1), (2, 16), (17, 32), (33, 64)])
def test_samples(dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    for sample in ops.linear.samples(torch.Generator().manual_seed(3), dtype):
        _check(sample.args, dtype, tokens)


# Columns and depths that are no multiples of a tile, deeper than one, and smaller than the smallest.
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize(("n", "k"), [(37, 101), (130, 2200), (3, 8), (257, 64)])
@pytest.mark.parametrize("rows", [1, 2, 13, 17, 64])
def test_odd_shapes(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    tokens = next(bounds for bounds in ((1, 1), (2, 16), (17, 32), (33, 64)) if rows <= bounds[1])
    _check(_drawn(dtype, rows, (rows, k), (n, k), (n,)), dtype, tokens)
