"""Gates by Triton kernels against their references."""

import pytest
import torch
from odd_samples import odd_samples
from triton_checks import check_lowering
from triton_schedules import TESTED

from ingot.backends.triton.lower.gate import LOWERINGS
from ingot.ir.ops import OPS
from ingot.ir.ops.activations import ACTIVATIONS

_KINDS = [("silu_mul", {}), ("gelu_mul", {"approximate": "none"}), ("gelu_mul", {"approximate": "tanh"})]


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", LOWERINGS)
def test_samples(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), dtype) + odd_samples(name, dtype):
        check_lowering(op, LOWERINGS[name], sample.args, sample.kwargs, dims={"T": sample.args[0].shape[0]})


# A part of a merged product, of a width that is no multiple of a block; values far out.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("scale", [1e-3, 60.0])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str, scale: float, rows: int, dtype: torch.dtype) -> None:
    merged = torch.randn(rows, 2 * 1100, generator=torch.Generator().manual_seed(rows)) * scale
    x = merged.to(dtype)[:, 1100:]
    check_lowering(OPS["activate"], LOWERINGS["activate"], (x,), {"kind": kind}, dims={"T": rows})


# Halves of a merged product, of a width that is no multiple of a block; values far out, where exponentials overflow.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 60.0])
@pytest.mark.parametrize(("name", "kwargs"), _KINDS)
def test_halves(name: str, kwargs: dict[str, str], scale: float, rows: int, dtype: torch.dtype) -> None:
    merged = torch.randn(rows, 2 * 1100, generator=torch.Generator().manual_seed(rows))
    merged[:, :1100] *= scale
    gate, up = merged.to(dtype)[:, :1100], merged.to(dtype)[:, 1100:]
    check_lowering(OPS[name], LOWERINGS[name], (gate, up), kwargs, dims={"T": rows})
