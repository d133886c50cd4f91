"""The ops of models whose layers carry several hidden states per token, called streams: x [T, n, D]."""

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Sample, define, wide
from ingot.ir.placements import Call, Fit, whole


def _randn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _mix_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x = _randn(g, dtype, 5, 4, 24)
    return [
        Sample((x, _randn(g, dtype, 5, 4, 4))),
        Sample((x[:, 1:2], _randn(g, dtype, 5, 3, 1))),
        Sample((x[:1], _randn(g, dtype, 1, 2, 4))),
    ]


@define(
    rows=("x", "weights"),
    samples=_mix_samples,
    flops=lambda x, weights: 2 * weights.numel() * x.shape[-1],
    placement=whole,
)
def mix(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return weighted sums [T, m, D] of the n hidden states (streams) that each token has, x [T, n, D].

    `weights` is [T, m, n]. The sums are rounded once, to x's dtype. Models with AltUp use it to predict and correct
    streams (arXiv 2301.13310).
    """
    full, factors = wide(x), wide(weights)
    total = factors[..., :1] * full[:, :1]
    for stream in range(1, x.shape[1]):
        total = total + factors[..., stream : stream + 1] * full[:, stream : stream + 1]
    return total.to(x.dtype)


def _concat_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x = _randn(g, dtype, 5, 4, 24)
    return [
        Sample((x[:, :1], x[:, 2:]), {"dim": 1}),
        Sample((_randn(g, dtype, 1, 8), _randn(g, dtype, 1, 3)), {"dim": 1}),
        Sample((x, _randn(g, dtype, 5, 4, 6)), {"dim": 2}),
    ]


def _concat_placement(call: Call) -> Fit:
    """The placement rule of `concat`: a mesh axis splits both arguments along one axis, but not along `dim`."""
    x = call.at["x"]
    if x is None or x.kind != "shard" or x.segments or x.dim in (0, call.values["dim"]):
        return whole(call)
    return Fit({"x": x, "y": x}, x)


@define(rows=("x", "y"), samples=_concat_samples, flops=0, placement=_concat_placement)
def concat(x: torch.Tensor, y: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Concatenate x and y along the axis `dim`, which must not be axis 0, the axis of tokens.

    Raises VerifyError for axis 0, and for an axis that x does not have.
    """
    if not 0 < dim < x.dim():
        raise VerifyError(f"concat along axis {dim} of {x.dim()}", expected="an axis after the first")
    return torch.cat([x, y], dim)


def _match_rms_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x, like = _randn(g, dtype, 5, 3, 24), _randn(g, dtype, 5, 1, 24) * 7
    return [
        Sample((x, like), {"least": 1e-5}),
        Sample((x[:, 1] * 1e-4, like[:, 0]), {"least": 1e-5}),
    ]


@define(rows=("x", "like"), samples=_match_rms_samples, flops=1, placement=whole)
def match_rms(x: torch.Tensor, like: torch.Tensor, *, least: float) -> torch.Tensor:
    """Scale x to the root mean square of `like` over the last axis: `x * rms(like) / rms(x)`, in x's dtype.

    x is [T, …, D]. `like` has the shape of x, but may have size 1 on the axes between the first and the last. The mean
    square of x counts as at least `least`.
    """
    full = wide(x)
    of_x = full.pow(2).mean(-1, keepdim=True).clamp(min=least)
    of_like = wide(like).pow(2).mean(-1, keepdim=True)
    return (full * torch.sqrt(of_like / of_x)).to(x.dtype)
