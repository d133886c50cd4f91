"""The op `swiglu`: the gated half of an MLP in one call. Importing this module defines it."""

import torch
import torch.nn.functional as F

from ingot.ir import ops
from ingot.ir.ops import Sample, define
from ingot.ir.ops.registry import wide
from ingot.ir.placements import whole


def _samples(generator: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return calls for tests: an ordinary one, and one of a single token with sizes that no vector divides."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [Sample((randn(5, 24), randn(64, 24))), Sample((randn(1, 13), randn(14, 13)))]


def _flops(x: torch.Tensor, weight: torch.Tensor) -> int:
    return 2 * x.numel() * weight.shape[0]  # of the matmul; the gate is small next to it


def _decompose(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product, half = ops.linear(x, weight), weight.shape[0] // 2
    gate, up = (torch.ops.aten.slice.Tensor(product, 1, begin, begin + half) for begin in (0, half))
    return ops.silu_mul(gate, up)


@define(
    rows=("x",),
    samples=_samples,
    flops=_flops,
    placement=whole,
    decompose=_decompose,
)
def swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, rounded once (arXiv 2002.05202).

    x [T, K], weight [2 F, K], which is gate over up: [T, F] in x's dtype.
    """
    gate, up = F.linear(wide(x), wide(weight)).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)
