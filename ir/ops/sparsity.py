"""The op of sparse activations, which keeps the largest elements of a row."""

import torch

from ingot.ir.ops.registry import Sample, define, wide
from ingot.ir.placements import whole


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    merged = (torch.randn(5, 64, generator=g) * 3 + 1).to(dtype)
    return [
        Sample((merged[:, :32],), {"deviations": 1.6448536269514722}),
        Sample((merged[:1, 40:],), {"deviations": -0.5}),
    ]


@define(rows=("x",), samples=_samples, flops=1, placement=whole)
def gaussian_top_k(x: torch.Tensor, *, deviations: float) -> torch.Tensor:
    """Return `relu(x - cutoff)` in x's dtype, for x [T, F], so that only the largest elements of a row stay.

    The cutoff of a row is `mean(x) + deviations * std(x)`. In normally distributed rows, it keeps a nearly fixed share
    of the elements, which depends on `deviations` (statistical top-k, arXiv 2506.06644). The standard deviation divides
    by F, not by F - 1.
    """
    full = wide(x)
    centred = full - full.mean(-1, keepdim=True)
    deviation = torch.sqrt(centred.pow(2).mean(-1, keepdim=True))
    return torch.relu(centred - deviations * deviation).to(x.dtype)
