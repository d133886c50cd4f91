"""Norms by Triton kernels against their references."""

import pytest
import torch
from odd_samples import odd_samples
from triton_checks import check_lowering
from triton_schedules import TESTED, new_schedule

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.norm import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", LOWERINGS)
def test_samples(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), dtype) + odd_samples(name, dtype):
        check_lowering(op, LOWERINGS[name], sample.args, sample.kwargs, dims={"T": sample.args[0].shape[0]})


# One token and a prime number of them; widths of models, no powers of two among them; one head, and a few.
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("inner", [(896,), (5120,), (1, 80), (5, 96), (37, 64)])
@pytest.mark.parametrize("name", LOWERINGS)
def test_shapes(name: str, inner: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows)
    merged = torch.randn(rows, *inner[:-1], inner[-1] + 8, generator=g).to(dtype) * 3 + 1
    x = merged[..., : inner[-1]]
    weight = torch.randn(inner[-1], generator=g).to(dtype)
    residual = (torch.randn(x.shape, generator=g).to(dtype),) if name == "add_rms_norm" else ()
    check_lowering(OPS[name], LOWERINGS[name], (x, *residual, weight), {"eps": 1e-5}, dims={"T": rows})


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("inner", [(896,), (5, 96)])
def test_biases(inner: tuple[int, ...], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(13, *inner, generator=g).to(dtype) * 3 + 1
    weight, bias = (torch.randn(inner[-1], generator=g).to(dtype) for _ in range(2))
    check_lowering(OPS["layer_norm"], LOWERINGS["layer_norm"], (x, weight, bias), {"eps": 1e-5}, dims={"T": 13})


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (TensorType(torch.float64, ("T", 8)), TensorType(torch.float64, (8,)), "f64"),
        (TensorType(torch.float32, ("T", 8), (1, 4)), TensorType(torch.float32, (8,)), "strided along its last axis"),
        (TensorType(torch.float32, ("T", 1 << 16)), TensorType(torch.float32, (1 << 16,)), "wider than"),
        (TensorType(torch.float32, ("T", 2, 2, 8)), TensorType(torch.float32, (8,)), "one to three axes"),
    ],
)
def test_refuses(x: TensorType, weight: TensorType, reason: str) -> None:
    call = Call(
        "rms_norm", {"x": Value(x, 0), "weight": Value(weight, 1)}, {"eps": 1e-5}, (TensorType(x.dtype, x.shape),)
    )
    with pytest.raises(Refused, match=reason):
        LOWERINGS["rms_norm"](call, new_schedule())
