"""What oracles are made of: the parts that published modeling codes have alike, in plain torch and without a cache.

An oracle recomputes the whole sequence at every call. It is written from the mathematics of the code that was published
with a checkpoint, apart from Ingot's readers and blocks.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensors = Mapping[str, torch.Tensor]
Logits = Callable[[Tensors, torch.Tensor], torch.Tensor]


class Oracle(nn.Module):
    """`logits` gives [n, vocab] for ids [n], from the tensors of a checkpoint in `dtype`."""

    def __init__(self, tensors: Tensors, dtype: torch.dtype, logits: Logits) -> None:
        super().__init__()
        self.tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.logits = logits

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        """ids [1, n] -> .logits [1, n, vocab]."""
        return SimpleNamespace(logits=self.logits(self.tensors, input_ids[0])[None])


def linear(tensors: Tensors, name: str, x: torch.Tensor, *, bias: bool = False) -> torch.Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"] if bias else None)


def rms_norm(tensors: Tensors, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return tensors[f"{name}.weight"] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(tensors: Tensors, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps)


def gated(tensors: Tensors, x: torch.Tensor, gate: str, up: str, down: str, *, down_bias: bool = False) -> torch.Tensor:
    return linear(tensors, down, F.silu(linear(tensors, gate, x)) * linear(tensors, up, x), bias=down_bias)


def frequencies(base: float, head_dim: int) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))


def scaled_frequencies(config: Mapping[str, Any], head_dim: int, context: int) -> torch.Tensor:
    """Of `rope_theta` and a `rope_scaling` that is linear or dynamic, for a sequence of `context` tokens.

    Published code chooses at every step; Ingot chooses once, for the context that it compiles for."""
    base, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling") or {}
    longest = config.get("max_position_embeddings", 2048)
    if scaling.get("type") == "dynamic" and context > longest:
        stretch = scaling["factor"] * context / longest - (scaling["factor"] - 1)
        base = base * stretch ** (head_dim / (head_dim - 2))
    return frequencies(base, head_dim) / (scaling["factor"] if scaling.get("type") == "linear" else 1.0)


def rotated(x: torch.Tensor, rates: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x [n, heads, head_dim], its halves in pairs; cosines and sines are multiplied by `scale`."""
    angles = torch.outer(torch.arange(x.shape[0]).float(), rates)
    cos, sin = (torch.cat([part, part], -1)[:, None] * scale for part in (angles.cos(), angles.sin()))
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of q [n, heads, d] to k and v [n, kv_heads, d] -> [n, heads * d]. With ALiBi each head's slope
    times the distance is taken from its scores. A token sees `window` positions, its own among them; None: all."""
    n, heads, head_dim = q.shape
    k, v = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k).float() / math.sqrt(head_dim)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    unseen = (distance < 0) | (distance >= (n if window is None else window))
    weights = scores.masked_fill(unseen, -math.inf).softmax(-1).to(q.dtype)
    return torch.einsum("hij,jhd->ihd", weights, v).reshape(n, heads * head_dim)
