"""Attention without a KV cache on a CPU, computed with torch's fused attention, sequence by sequence."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.ops import step_attention


def step_attention_ops() -> dict[str, Callable[..., Any]]:
    """Return the function of the op `step_attention`, attention without a KV cache.

    The key of the dict is "ingot.step_attention".
    """
    return {"ingot.step_attention": _step_attention}


def _step_attention(
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
    """Compute the op `step_attention`: attention among the tokens of each sequence in the step, without a KV cache.

    It calls torch's attention once per sequence.
    """
    if sinks is not None or slopes is not None or soft_cap is not None:  # not in torch's fused attention
        attended: torch.Tensor = step_attention.reference(
            q, k, v, q_starts, q_lens, sinks, slopes, scale=scale, mask=mask, soft_cap=soft_cap
        )
        return attended
    out = torch.zeros(q.shape, dtype=q.dtype)
    for start, count in zip(q_starts.tolist(), q_lens.tolist(), strict=True):
        if count:
            own = slice(start, start + count)
            out[own] = attend_one(q[own], k[own], v[own], scale, Mask.named(mask))
    return out


def attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask) -> torch.Tensor:
    """Return the attention [n, H, D] of one sequence of n tokens, for q [n, H, D] and k, v [n, KV, D].

    H is the number of q heads, KV the number of k/v heads.
    """
    places = torch.arange(q.shape[0])
    query, keys, values = (one.transpose(0, 1)[None] for one in (q, k, v))
    mixed = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=None if mask.kind == "bidirectional" else mask.seen(places, places),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return mixed[0].transpose(0, 1)
