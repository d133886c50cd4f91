"""Elementwise ops by Triton kernels, against torch and the references."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from odd_samples import odd_samples
from triton_checks import check_lowering
from triton_schedules import TESTED, new_schedule

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.elementwise import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType


def _aten(name: str) -> Any:
    """What `check_lowering` needs of an op, of aten's sum or product."""
    function = {"aten.add.Tensor": torch.add, "aten.mul.Tensor": torch.mul}[name]
    return SimpleNamespace(
        name=name,
        states=(),
        reference=function,
        fake=function,
        bind=lambda args, kwargs: {"x": args[0], "other": args[1], **kwargs},
    )


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", ["soft_cap", "clamp", "cast", "scale_by_position"])
def test_samples(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), dtype) + odd_samples(name, dtype):
        check_lowering(op, LOWERINGS[name], sample.args, sample.kwargs, dims={"T": sample.args[0].shape[0]})


@pytest.mark.parametrize("dtype", TESTED)
def test_cast_to_wider_and_narrower(dtype: torch.dtype) -> None:
    x = torch.randn(3, 1030, generator=torch.Generator().manual_seed(1))
    check_lowering(OPS["cast"], LOWERINGS["cast"], (x.to(dtype),), {"dtype": torch.float32}, dims={"L": 3})
    check_lowering(OPS["cast"], LOWERINGS["cast"], (x,), {"dtype": dtype}, dims={"L": 3})


# From caps that hardly show, where the error of tanh near zero would, to caps that all values meet.
@pytest.mark.parametrize("cap", [1e4, 20.0, 0.5, 0.01])
def test_soft_cap(cap: float) -> None:
    x = torch.randn(2, 500, generator=torch.Generator().manual_seed(1))
    check_lowering(OPS["soft_cap"], LOWERINGS["soft_cap"], (x,), {"cap": cap}, dims={"L": 2})


# The shapes that programs have: sums with a residual and a bias, products with a number, heads.
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", ["aten.add.Tensor", "aten.mul.Tensor"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 37), (1, 37)),
        ((13, 1100), (13, 1100)),
        ((13, 37), (37,)),
        ((13, 37), (13, 1)),
        ((13, 37), (1, 37)),
        ((13, 5, 18), (13, 5, 18)),
        ((13, 5, 18), (5, 1)),
        ((13, 5, 18), (13, 1, 18)),
        ((37,), (13, 37)),
        ((37,), (37,)),
    ],
)
def test_arithmetic(left: tuple[int, ...], right: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    x, other = (torch.randn(shape, generator=g).to(dtype) for shape in (left, right))
    check_lowering(_aten(name), LOWERINGS[name], (x, other), {}, dims={"T": 13})


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", ["aten.add.Tensor", "aten.mul.Tensor"])
def test_arithmetic_of_strided_and_of_numbers(name: str, dtype: torch.dtype) -> None:
    merged = torch.randn(13, 3, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = merged[:, :2, :16], merged[:, 1:, 5:37:2]
    check_lowering(_aten(name), LOWERINGS[name], parts, {}, dims={"T": 13})
    for number in (0.25, -3, 55.42):
        check_lowering(_aten(name), LOWERINGS[name], (merged[:, 0].contiguous(), number), {}, dims={"T": 13})


def test_sum_with_alpha() -> None:
    x = torch.randn(3, 5)
    check_lowering(_aten("aten.add.Tensor"), LOWERINGS["aten.add.Tensor"], (x, 2.0), {"alpha": 3}, dims={"T": 3})
    with pytest.raises(Refused, match="alpha is 3"):
        check_lowering(_aten("aten.add.Tensor"), LOWERINGS["aten.add.Tensor"], (x, x), {"alpha": 3}, dims={"T": 3})


@pytest.mark.parametrize(
    ("x", "other", "reason"),
    [
        (TensorType(torch.int32, ("T", 8)), TensorType(torch.int32, ("T", 8)), "i32"),
        (TensorType(torch.float32, ("T",)), TensorType(torch.float32, ("T",)), "one to three axes"),
        (TensorType(torch.float32, ("T", 8)), TensorType(torch.float32, ("T", 4)), "does not broadcast"),
    ],
)
def test_refuses(x: TensorType, other: TensorType, reason: str) -> None:
    call = Call("aten.add.Tensor", {"x": Value(x, 0), "other": Value(other, 1)}, {}, (x,))
    with pytest.raises(Refused, match=reason):
        LOWERINGS["aten.add.Tensor"](call, new_schedule())
