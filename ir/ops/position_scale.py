"""The op that scales queries by the positions of their tokens, so that attention stays sharp over long contexts."""

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Sample, define, wide
from ingot.ir.placements import Call, Fit, whole


def _placement(call: Call) -> Fit:
    """The placement rule: x may be split along any dim but the tokens, and may be a partial sum."""
    x = call.at["x"]
    return Fit({"x": x}, x) if x is not None and (x.kind == "partial" or x.dim > 0) else whole(call)


def _check(x: torch.Tensor, positions: torch.Tensor, period: int, shift: int) -> None:
    if period < 1 or shift < 0:
        raise VerifyError(
            f"period {period} and shift {shift}",
            where="ingot.scale_by_position",
            expected="a period of at least 1 position and a shift of at least 0",
        )
    if positions.dtype != torch.int32 or positions.shape != x.shape[:1]:
        raise VerifyError(
            f"positions {positions.dtype} {list(positions.shape)}",
            where="ingot.scale_by_position",
            expected=f"int32 [{x.shape[0]}], one for each row of x",
        )


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    positions = torch.tensor([0, 1, 63, 17], dtype=torch.int32)
    x = torch.randn(4, 3, 16, generator=g).to(dtype)
    return [
        Sample((x, positions), {"period": 16, "strength": 0.7}),
        Sample((x.flatten(1), positions), {"period": 3, "strength": 0.1, "shift": 1}),
    ]


@define(
    rows=("x", "positions"),
    samples=_samples,
    flops=1,
    placement=_placement,
)
def scale_by_position(
    x: torch.Tensor, positions: torch.Tensor, *, period: int, strength: float, shift: int = 0
) -> torch.Tensor:
    """Multiply x [T, …] by `1 + strength * ln(1 + n)`, where n counts whole periods before the token's position.

    n is `(position + shift) // period`, for `positions` i32[T]. Tokens of the first period keep their values. The
    product is rounded once, to x's dtype. It is the temperature of queries in Llama 4 and Mistral 4, as in Scalable
    Softmax (arXiv 2501.19399).
    """
    _check(x, positions, period, shift)
    full = wide(x)
    periods = ((positions + shift) // period).to(full.dtype)
    factors = 1 + strength * torch.log1p(periods)
    return (full * factors.view(-1, *[1] * (x.dim() - 1))).to(x.dtype).contiguous()
