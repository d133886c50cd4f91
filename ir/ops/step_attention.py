"""The op of attention without a KV cache, for steps that hold whole sequences, as in encoders."""

from typing import Any

import torch

from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.ops.attention import attention, like_q, slopes_sample
from ingot.ir.ops.registry import Function, Sample, define
from ingot.ir.placements import Call, Fit, by_heads


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return sample calls with sequences of 5, 0 and 1 tokens, and with one token of no sequence."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    args = (randn(7, 6, 16), randn(7, 2, 16), randn(7, 2, 16), ints(0, 0, 5), ints(5, 0, 1))
    masks = ("causal", "bidirectional", "chunked_2", "block_causal_2")
    return [
        *(Sample(args, {"scale": 0.25, "mask": mask}) for mask in masks),
        Sample((*args, randn(6)), {"scale": 0.25, "mask": "window_2", "soft_cap": 3.0}),
        Sample((*args, randn(6)), {"scale": 0.25, "mask": "bidirectional", "soft_cap": 3.0}),
        Sample((*args, None, slopes_sample(6)), {"scale": 0.25}),
        Sample((*args, randn(6), slopes_sample(6)), {"scale": 0.25, "mask": "bidirectional"}),
    ]


def _by_sequence(form: Function, args: Any, kwargs: Any) -> torch.Tensor:
    """Compute a call of `step_attention`, one sequence after the other.

    `form` computes the attention of one sequence. It takes the arguments of the op `attention`. `args` and `kwargs` are
    the arguments of `step_attention`.
    """
    call = step_attention.bind(args, kwargs)
    q, k, v = call["q"], call["k"], call["v"]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    options = {name: call[name] for name in ("scale", "mask", "soft_cap")}
    for start, count in zip(call["q_starts"].tolist(), call["q_lens"].tolist(), strict=True):
        if count:
            own = slice(start, start + count)
            places = torch.arange(count, dtype=torch.int32, device=q.device)
            one = torch.zeros_like(places)
            out[own] = form(q[own], k[own], v[own], places, one, call["sinks"], call["slopes"], layer=0, **options)
    return out


def _rowwise(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _by_sequence(attention.rowwise, args, kwargs)


def _flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_starts: torch.Tensor, *_: object, **kw: Any) -> float:
    """Return the flops of both matmuls (q with keys, weights with values), for sequences of equal length."""
    length = q.shape[0] / q_starts.shape[0]
    mask = Mask.named(kw.get("mask", CAUSAL.name))
    seen = length if mask.looks_ahead else (length + 1) / 2
    return 4 * q.numel() * (min(seen, mask.size) if mask.forgets else seen)


def _costliest(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Allocate the most memory that a call of `step_attention` can need. The memory planner measures it.

    The worst case is that all tokens belong to one sequence. The result only has the right shape.
    """
    call = step_attention.bind(args, kwargs)
    q, k, v = call["q"], call["k"], call["v"]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    places = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    options = {name: call[name] for name in ("scale", "mask", "soft_cap")}
    seqs, last = torch.zeros_like(places), (call["sinks"], call["slopes"])
    out[:] = attention.reference(q, k, v, places, seqs, *last, layer=0, **options)
    return out


def _placement(call: Call) -> Fit:
    return by_heads(call, {"q": 1, "k": 1, "v": 1, "sinks": 0, "slopes": 0}, call.shard(1))


@define(
    samples=_samples,
    rows=("q",),
    rowwise=_rowwise,
    fake=like_q,
    flops=_flops,
    costliest=_costliest,
    fusible=False,
    needs_kernel=True,
    legal="cached",
    placement=_placement,
)
def step_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *,
    scale: float,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Return the attention [T, H, D] within each sequence of a step, for q [T, H, D], k and v [T, KV, D].

    The step holds whole sequences, so no cache is read. Tokens `q_starts[b]` to `q_starts[b] + q_lens[b]` belong to
    sequence b. The first of them is at position 0. The rows of padding tokens are zero. `mask` says which positions a
    token sees (`ingot.ir.masks`). `soft_cap` bounds each score to cap * tanh(score / cap). `sinks` [H] are extra logits
    in the softmax of each head. `slopes` f32[H] are the slopes of ALiBi.
    """
    args = (q, k, v, q_starts, q_lens, sinks, slopes)
    return _by_sequence(attention.reference, args, {"scale": scale, "mask": mask, "soft_cap": soft_cap})
