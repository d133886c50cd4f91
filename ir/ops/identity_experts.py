"""The op of experts that return their input, which a mixture may have besides experts with weights."""

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Sample, bytes_of, define, wide
from ingot.ir.placements import whole


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    chosen = torch.tensor([[0, 3, 5], [1, 0, 2], [4, 6, 3], [5, 4, 1]], dtype=torch.int32)
    weights = torch.rand(4, 3, generator=g).to(torch.promote_types(dtype, torch.float32))
    x = torch.randn(4, 24, generator=g).to(dtype)
    return [Sample((x, weights, chosen), {"experts": 3}), Sample((x[:1], weights[:1], chosen[:1]), {"experts": 6})]


@define(
    rows=("x", "weights", "chosen"),
    samples=_samples,
    flops=1,
    traffic=lambda x, weights, chosen, **_: 2 * bytes_of(x) + bytes_of(weights, chosen),
    placement=whole,
)
def identity_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, experts: int) -> torch.Tensor:
    """Multiply each token of x [T, D] by the sum of the weights of its choices from number `experts` on.

    `weights` f32[T, top_k] and `chosen` i32[T, top_k] are a router's. The first `experts` experts have weights, and the
    op `experts` computes them. The others return their input, as the zero experts of LongCat-Flash (arXiv 2509.01322).
    """
    if experts < 1:
        raise VerifyError(f"{experts} experts with weights", where="ingot.identity_experts", expected="at least 1")
    if chosen.dtype != torch.int32 or weights.shape != chosen.shape or chosen.shape[0] != x.shape[0]:
        raise VerifyError(
            f"weights {list(weights.shape)} and experts {chosen.dtype} {list(chosen.shape)}",
            where="ingot.identity_experts",
            expected=f"[T, top_k] and int32 [T, top_k], with T = {x.shape[0]}",
        )
    full = wide(x)
    counted = torch.where(chosen >= experts, weights.to(full.dtype), 0.0)
    return (full * counted.sum(-1, keepdim=True)).to(x.dtype).contiguous()
