"""A decoder of Llama's kind in plain torch, for families that transformers has no class for.

It has no cache: a call sees a whole sequence. It rounds where the published modules round: norms and softmax are in
float32, all else in the model's dtype.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

_ROPE_FIELDS = (
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)


def frequencies(config: Mapping[str, Any], head_dim: int, max_seq_len: int) -> tuple[torch.Tensor, float]:
    """Radians of each pair by position, and the factor on cosines and sines, by transformers' own functions. Types that
    look at the length of a sequence are given `max_seq_len`."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {name: config[name] for name in _ROPE_FIELDS if name in config}
    made = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, num_key_value_heads=1, head_dim=head_dim, **fields)
    kind, base = made.rope_parameters["rope_type"], made.rope_parameters["rope_theta"]
    if kind == "default":
        return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim), 1.0
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[kind](made, device=torch.device("cpu"), seq_len=max_seq_len)
    return found


def rms_norm(x: torch.Tensor, gains: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return gains * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [n, heads, head_dim] with halves of heads as pairs; cos, sin [n, head_dim / 2]."""
    one, other = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """q [n, heads, head_dim] over k, v [n, kv_heads, head_dim] -> [n, heads * head_dim]. A token sees `window`
    positions, its own among them."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    at = torch.arange(q.shape[1])
    behind = at[:, None] - at[None, :]
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    weights = scores.masked_fill(hidden, -torch.inf).float().softmax(-1).to(v.dtype)
    return (weights @ v).transpose(0, 1).flatten(1)


class LlamaOracle(nn.Module):
    """Families are subclasses: they say names, and what a layer does."""

    embed, last_norm = "model.embed_tokens", "model.norm"
    eps_field = "rms_norm_eps"

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
    ) -> None:
        super().__init__()
        self.config, self.tensors = config, {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.heads = config["num_attention_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.frequencies, self.factor = frequencies(config, self.head_dim, max_seq_len)

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        """ids [1, n] -> logits [1, n, vocab]."""
        h = self.tensors[f"{self.embed}.weight"][ids[0]]
        angles = torch.outer(torch.arange(len(h), dtype=torch.float), self.frequencies)
        self.cos, self.sin = ((turn * self.factor).to(h.dtype) for turn in (angles.cos(), angles.sin()))
        head = self.embed if self.tied() else "lm_head"
        return SimpleNamespace(logits=self.linear(self.norm(self.layers(h), self.last_norm), head)[None])

    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    def layers(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config[self.eps_field])

    def attention(
        self, x: torch.Tensor, place: str, kv_heads: int, window: int | None = None, o: str = "o_proj"
    ) -> torch.Tensor:
        q, k, v = (self.linear(x, f"{place}.{name}_proj").view(len(x), -1, self.head_dim) for name in "qkv")
        assert (q.shape[1], k.shape[1], v.shape[1]) == (self.heads, kv_heads, kv_heads)
        q, k = (rotated(heads, self.cos, self.sin) for heads in (q, k))
        return self.linear(attend(q, k, v, window), f"{place}.{o}")

    def gated(self, x: torch.Tensor, place: str, gate: str, up: str, down: str) -> torch.Tensor:
        opened = nn.functional.silu(self.linear(x, f"{place}.{gate}"))
        return self.linear(opened * self.linear(x, f"{place}.{up}"), f"{place}.{down}")
