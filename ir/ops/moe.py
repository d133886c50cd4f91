"""The op of a mixture of experts: each token runs through the `top_k` experts with the highest router weights.

Only the device knows the number of tokens per expert. No size of a program depends on it: there are always T * top_k
rows, grouped by expert, and a count per expert.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ingot.ir.errors import VerifyError
from ingot.ir.ops.activations import silu_mul
from ingot.ir.ops.registry import Sample, bytes_of, define, wide
from ingot.ir.placements import Call, Fit, whole


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` experts with the largest weights for each token, from `router_logits` [T, E].

    Returns (weights f32[T, top_k], experts i64[T, top_k]), largest weight first. A weight is the expert's softmax
    probability over all experts. `renormalize` divides it by the sum of the chosen weights. Among equal weights, the
    lowest expert index comes first.
    """
    ordered = router_logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = ordered.values[:, :top_k], ordered.indices[:, :top_k]
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), experts


def group_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the chosen experts of all tokens by expert, and return (order i64[T * top_k], counts i64[num_experts]).

    `experts` i64[T, top_k] holds the chosen experts. Choice i of token t has the number t * top_k + i. `order` lists
    these numbers: first all choices of expert 0, then those of expert 1, and so on. Within an expert they are in token
    order. `counts` says how many choices each expert has.
    """
    flat = experts.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return flat.argsort(stable=True), counts.scatter_add_(0, flat, torch.ones_like(flat))


def _checked(
    x: torch.Tensor, router_logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_k: int
) -> None:
    if router_logits.dtype not in (torch.float32, torch.float64):
        raise VerifyError(
            f"the router's logits are {router_logits.dtype}",
            expected="float32: a narrower dtype rounds away the differences that choose experts",
            hint="cast them before moe",
        )
    num_experts, hidden = router_logits.shape[-1], x.shape[-1]
    ffn = down.shape[-1]
    if gate_up.shape != (num_experts, 2 * ffn, hidden) or down.shape != (num_experts, hidden, ffn):
        raise VerifyError(
            f"expert weights {list(gate_up.shape)} and {list(down.shape)}",
            expected=f"[E, 2F, D] and [E, D, F], with E = {num_experts} and D = {hidden}",
        )
    if not 1 <= top_k <= num_experts:
        raise VerifyError(f"top_k is {top_k}", expected=f"1 to {num_experts}, the number of experts")


def _fake(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
) -> torch.Tensor:
    _checked(x, router_logits, gate_up, down, top_k)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _flops(
    x: torch.Tensor, router_logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, top_k: int, **_: object
) -> int:
    return 6 * top_k * x.numel() * int(down.shape[2])  # gate, up and down, two operations a weight


def _traffic(
    x: torch.Tensor, router_logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, top_k: int, **_: object
) -> int:
    """Return the bytes that a call reads and writes.

    It assumes that the tokens choose as many different experts as possible. The weights of each of these are read once.
    """
    experts = min(gate_up.shape[0], x.shape[0] * top_k)
    return 2 * bytes_of(x) + bytes_of(router_logits) + experts * bytes_of(gate_up[:1], down[:1])


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) / math.sqrt(shape[-1])).to(dtype)

    router_dtype = torch.promote_types(dtype, torch.float32)
    args = (randn(6, 24), torch.randn(6, 4, generator=g).to(router_dtype), randn(4, 40, 24), randn(4, 24, 20))
    # With one token most experts get none.
    return [
        Sample(args, {"top_k": 2}),
        Sample(args, {"top_k": 3, "renormalize": False}),
        Sample((args[0][:1], args[1][:1], *args[2:]), {"top_k": 1}),
    ]


def _through(
    x: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    counts: Sequence[int],
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Run each token of x through its chosen experts, and return the weighted sums [T, D].

    `weights` [T, top_k] holds the weight of each choice. `order` lists the choices (token * top_k + i) by expert. The
    first `counts[0]` of them belong to expert 0, the next `counts[1]` to expert 1, and so on. `gate_up` and `down` are
    the experts' matrices.
    """
    rows = x[order // weights.shape[1]]
    made = torch.empty_like(rows)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            mine = slice(begin, begin + count)
            gate, up = F.linear(rows[mine], gate_up[expert]).chunk(2, -1)
            made[mine] = F.linear(silu_mul.reference(gate, up), down[expert])
        begin += count
    by_choice = torch.empty_like(made)
    by_choice[order] = made
    shares = wide(by_choice).view(*weights.shape, x.shape[-1]) * weights[..., None]
    return shares.sum(1).to(x.dtype)


def _all_to_the_same(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
) -> torch.Tensor:
    """Allocate the most memory that a call of `moe` can need. The memory planner measures it.

    The worst case is that all tokens choose the same experts. The result only has the right shape.
    """
    weights, experts = route(router_logits, top_k, renormalize)
    order, _ = group_by_expert(experts, gate_up.shape[0])
    return _through(x, weights, order, [x.shape[0]] * top_k, gate_up, down)


def _placement(call: Call) -> Fit:
    """The placement rule of `moe` on a mesh axis: each rank has a part of every expert's gate, up and down weights.

    The result is then a partial sum: the sum over the ranks is still to be added. If the weights are not split, every
    rank has all arguments whole.
    """
    if call.kind("gate_up") != "shard" and not call.is_shard("down", 2):
        return whole(call)
    size = call.size("down", 2)
    assert isinstance(size, int)
    halves = (size * call.parts,) * 2
    return Fit({"gate_up": call.shard(1, halves), "down": call.shard(2)}, call.partial)


@define(
    rows=("x", "router_logits"),
    samples=_samples,
    fake=_fake,
    costliest=_all_to_the_same,
    flops=_flops,
    multiplies=True,
    traffic=_traffic,
    fusible=False,
    placement=_placement,
)
def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
) -> torch.Tensor:
    """Run each token of x [T, D] through its `top_k` experts, and return the weighted sums [T, D].

    `router_logits` f32[T, E] choose the experts and give their weights, by a softmax. `renormalize` makes the weights
    of a token sum to 1. Expert e computes `down[e] @ silu_mul(gate_up[e] @ x)`. `gate_up` is [E, 2F, D], with the gate
    first. `down` is [E, D, F]. Each matmul is rounded to x's dtype, as in `linear`. The weighted sum is rounded once.
    """
    _checked(x, router_logits, gate_up, down, top_k)
    weights, experts = route(router_logits, top_k, renormalize)
    order, counts = group_by_expert(experts, gate_up.shape[0])
    return _through(x, weights, order, counts.tolist(), gate_up, down)
