"""A decoder of Llama's kind as an oracle, made of the parts in oracle.py: families are subclasses."""

import abc
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import oracle
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
        return oracle.frequencies(base, head_dim), 1.0
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[kind](made, device=torch.device("cpu"), seq_len=max_seq_len)
    return found


class LlamaOracle(nn.Module, abc.ABC):
    """Subclasses say names, and what the layers do. Linear maps have a bias where the checkpoint has one."""

    embed, last_norm = "model.embed_tokens", "model.norm"
    eps_field = "rms_norm_eps"

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
    ) -> None:
        super().__init__()
        self.config, self.tensors = config, {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.heads = config["num_attention_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.rotation = frequencies(config, self.head_dim, max_seq_len)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        """ids [1, n] -> .logits [1, n, vocab]."""
        h = self.layers(self.tensors[f"{self.embed}.weight"][input_ids[0]])
        head = self.embed if self.tied() else "lm_head"
        return SimpleNamespace(logits=self.linear(self.norm(h, self.last_norm), head)[None])

    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    @abc.abstractmethod
    def layers(self, h: torch.Tensor) -> torch.Tensor:
        """h [n, hidden] -> the same shape."""

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return oracle.linear(self.tensors, name, x, bias=f"{name}.bias" in self.tensors)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return oracle.rms_norm(self.tensors, name, x, self.config[self.eps_field])

    def attention(
        self, x: torch.Tensor, place: str, kv_heads: int, window: int | None = None, o: str = "o_proj"
    ) -> torch.Tensor:
        q, k, v = (self.linear(x, f"{place}.{name}_proj").view(len(x), -1, self.head_dim) for name in "qkv")
        assert (q.shape[1], k.shape[1], v.shape[1]) == (self.heads, kv_heads, kv_heads)
        q, k = (oracle.rotated(heads, *self.rotation) for heads in (q, k))
        return self.linear(oracle.attention(q, k, v, window=window), f"{place}.{o}")

    def gated(self, x: torch.Tensor, place: str, gate: str, up: str, down: str) -> torch.Tensor:
        opened = nn.functional.silu(self.linear(x, f"{place}.{gate}"))
        return self.linear(opened * self.linear(x, f"{place}.{up}"), f"{place}.{down}")
