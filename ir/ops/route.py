"""The ops of a router in a mixture of experts: they choose the experts of each token, and the weights of these experts.

Both return fixed shapes and read no data on the host, so that a step's launches do not depend on the routing.
"""

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Sample, define
from ingot.ir.placements import whole

SCORES = ("softmax", "sigmoid")


def check_logits(router_logits: torch.Tensor, top_k: int) -> int:
    """Return the number of experts, the last axis of `router_logits`.

    Raises VerifyError if the logits are no float32, or if `top_k` is not between 1 and the number of experts.
    """
    if router_logits.dtype not in (torch.float32, torch.float64):
        raise VerifyError(
            f"the router's logits are {router_logits.dtype}",
            expected="float32: a narrower dtype rounds away the differences that choose experts",
            hint="cast them before the op",
        )
    num_experts = router_logits.shape[-1]
    if not 1 <= top_k <= num_experts:
        raise VerifyError(f"top_k is {top_k}", expected=f"1 to {num_experts}, the number of experts")
    return num_experts


def _check_groups(num_experts: int, top_k: int, groups: int, kept_groups: int, group_best: int) -> None:
    """Raise VerifyError unless the experts divide into groups, and the kept groups have enough experts."""
    if groups < 1 or num_experts % groups:
        raise VerifyError(f"{num_experts} experts in {groups} groups", expected="a multiple")
    if not 1 <= kept_groups <= groups:
        raise VerifyError(f"{kept_groups} of {groups} groups are kept", expected=f"1 to {groups}")
    size = num_experts // groups
    if top_k > kept_groups * size:
        raise VerifyError(
            f"top_k is {top_k}", expected=f"at most {kept_groups * size}, the experts of {kept_groups} groups"
        )
    if groups > 1 and not 1 <= group_best <= size:
        raise VerifyError(f"a group's score is the sum of its {group_best} best", expected=f"1 to {size}")


def _fake(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    scores: str = "softmax",
    renormalize: bool = False,
    least_sum: float = 0.0,
    groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 2,
    scale: float = 1.0,
    by_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts = check_logits(router_logits, top_k)
    _check_groups(num_experts, top_k, groups, kept_groups, group_best)
    if scores not in SCORES:
        raise VerifyError(f"scores '{scores:.80}'", where="ingot.route", expected=", ".join(SCORES))
    if bias is not None and (bias.shape != (num_experts,) or bias.dtype != router_logits.dtype):
        raise VerifyError(f"bias {bias.dtype} {list(bias.shape)}", expected=f"{router_logits.dtype} [{num_experts}]")
    if by_logits and (bias is not None or groups > 1):
        raise VerifyError("experts are chosen by logits", expected="no bias and one group, which are for scores")
    return _empty(router_logits, top_k)


def _empty(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results of the right shapes without values: weights [T, top_k] and experts i32[T, top_k]."""
    shape = (router_logits.shape[0], top_k)
    return router_logits.new_empty(shape), router_logits.new_empty(shape, dtype=torch.int32)


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    logits = torch.randn(6, 8, generator=g).to(torch.promote_types(dtype, torch.float32))
    bias = torch.randn(8, generator=g).to(logits.dtype)
    grouped = {"groups": 4, "kept_groups": 2, "scores": "sigmoid", "renormalize": True, "least_sum": 1e-20}
    return [
        Sample((logits,), {"top_k": 3}),
        Sample((logits,), {"top_k": 2, "renormalize": True}),
        Sample((logits[:1], bias), {"top_k": 1, "scores": "sigmoid"}),
        Sample((logits + 20,), {"top_k": 2, "scores": "sigmoid", "by_logits": True}),
        Sample((logits, bias), {"top_k": 3, "scale": 2.5, **grouped}),
        Sample((logits, bias), {"top_k": 4, "group_best": 1, **grouped}),
    ]


@define(rows=("router_logits",), samples=_samples, fake=_fake, flops=1, fusible=False, on_device=True, placement=whole)
def route(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    scores: str = "softmax",
    renormalize: bool = False,
    least_sum: float = 0.0,
    groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 2,
    scale: float = 1.0,
    by_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts for each token: return their weights f32[T, top_k] and their indices i32[T, top_k].

    `router_logits` f32[T, E] become scores by "softmax" over all experts, or by "sigmoid". The experts with the highest
    scores are chosen, best first; among equal scores, the lowest index. `bias` f32[E] is added to the scores for the
    choice alone, as in DeepSeek-V3 (arXiv 2412.19437). A weight is the expert's score without bias, times `scale`.
    `renormalize` divides it by the sum of the chosen scores, or by `least_sum` if the sum is less. With softmax this
    equals a softmax over the chosen logits.

    With `by_logits`, the experts with the highest logits are chosen. Scores are rounded, so different logits may have
    equal scores: from 17 on, a sigmoid in float32 is 1. It needs one group and no bias.

    With several `groups` of successive experts, only the `kept_groups` best groups are open to the choice. A group's
    score is the sum of its `group_best` best scores, bias included.
    """
    _fake(
        router_logits,
        bias,
        top_k=top_k,
        scores=scores,
        groups=groups,
        kept_groups=kept_groups,
        group_best=group_best,
        by_logits=by_logits,
    )
    all_scores = router_logits.softmax(-1) if scores == "softmax" else router_logits.sigmoid()
    by = router_logits if by_logits else all_scores if bias is None else all_scores + bias
    if groups > 1:
        grouped = by.unflatten(-1, (groups, -1))
        of_groups = grouped.sort(dim=-1, descending=True, stable=True).values[..., :group_best].sum(-1)
        order = of_groups.argsort(dim=-1, descending=True, stable=True)
        closed = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, order[:, :kept_groups], False)
        by = grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)
    chosen = by.argsort(dim=-1, descending=True, stable=True)[:, :top_k].clone(memory_format=torch.contiguous_format)
    weights = all_scores.gather(-1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=least_sum)
    return weights * scale, chosen.to(torch.int32)


def _mixer_fake(router_logits: torch.Tensor, *, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    check_logits(router_logits, 2)
    return _empty(router_logits, 2)


def _mixer_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    logits = torch.randn(6, 8, generator=g).to(torch.promote_types(dtype, torch.float32))
    return [Sample((logits,), {"jitter": jitter}) for jitter in (0.01, 0.6)]


@define(
    rows=("router_logits",),
    samples=_mixer_samples,
    fake=_mixer_fake,
    flops=1,
    fusible=False,
    on_device=True,
    placement=whole,
)
def sparse_mixer(router_logits: torch.Tensor, *, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose two experts for each token by SparseMixer (arXiv 2409.12136): weights f32[T, 2] and indices i32[T, 2].

    The first expert has the highest of `router_logits` f32[T, E], the second one the next. Among equal logits, the
    lowest index comes first. A weight is the softmax probability among the logits close to the chosen one. A logit l is
    close to the chosen logit m if (m - l) / max(|l|, m) is at most 2 * `jitter`. The first expert's logit does not
    count for the second one's weight.
    """
    check_logits(router_logits, 2)
    chosen = router_logits.argsort(dim=-1, descending=True, stable=True)[:, :2].clone(
        memory_format=torch.contiguous_format
    )
    weights, left = [], router_logits
    for expert in chosen.split(1, dim=-1):
        most = router_logits.gather(-1, expert)
        far = (most - router_logits) / router_logits.abs().maximum(most) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, expert))
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(weights, -1), chosen.to(torch.int32)
