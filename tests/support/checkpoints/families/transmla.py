"""Converted checkpoints of TransMLA: Llama by its own code (transmla/transformers/mla.py), and Qwen 3 with norms of q
and k, which has no published code: written from the equations on docs/convert.md."""

import abc
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import expert_weights
import oracle
import random_fields
import torch
from drawn_weights import DrawnWeights
from llama_oracle import LlamaOracle, frequencies
from mutations import Change, Mutation, each, some, without
from tiny_checkpoint import MAX_SEQ_LEN, Tiny

from families.family import Config, Family
from ingot.models.blocks.latent_attention import LatentAttentionSpec
from ingot.models.blocks.normed_latent_attention import NormedLatentAttentionSpec

_LLAMA, _QWEN = "LlamaMLAForCausalLM", "Qwen3MLAForCausalLM"
_ROPES = ("default", "linear", "llama3")


def _around(config: Config, generator: torch.Generator, attention: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a decoder of Llama's kind with these attentions."""
    hidden, bias = config["hidden_size"], config.get("mlp_bias", False)
    drawn = DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        attention(drawn, f"{layer}.self_attn", config)
        expert_weights.gated(drawn, f"{layer}.mlp", config["intermediate_size"], hidden, bias=bias)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _llama_attention(drawn: DrawnWeights, place: str, config: Config) -> None:
    hidden, heads, bias = config["hidden_size"], config["num_attention_heads"], config.get("attention_bias", False)
    inner, rotated, wide = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    drawn.matrix(f"{place}.q_proj", heads * (inner + rotated), hidden, bias=bias)
    drawn.matrix(f"{place}.kv_a_proj_with_mqa", config["kv_lora_rank"] + rotated, hidden, bias=bias)
    if config.get("qk_latent_layernorm", True):
        drawn.norm(f"{place}.kv_a_layernorm", config["kv_lora_rank"])
    drawn.matrix(f"{place}.kv_b_proj", heads * (inner + wide), config["kv_lora_rank"])
    drawn.matrix(f"{place}.o_proj", hidden, heads * wide)


def _qwen_attention(drawn: DrawnWeights, place: str, config: Config) -> None:
    hidden, heads, bias = config["hidden_size"], config["num_attention_heads"], config.get("attention_bias", False)
    width, rotated, rank = config["head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    keys = config["num_key_value_heads"] * width
    for name, rows in (("q", heads * width), ("k", keys), ("v", keys)):
        drawn.matrix(f"{place}.{name}_proj", rows, hidden, bias=bias)
    for name in "qk":
        drawn.norm(f"{place}.{name}_norm", width)
    drawn.matrix(f"{place}.q_rope_proj", heads * rotated, width)
    drawn.matrix(f"{place}.kv_a_proj_with_mqa", rank + rotated, 2 * keys)
    drawn.matrix(f"{place}.kv_b_proj", heads * 2 * width, rank)
    drawn.matrix(f"{place}.o_proj", hidden, heads * width, bias=bias)


class _Oracle(LlamaOracle):
    def __init__(
        self, config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
    ) -> None:
        super().__init__(config, tensors, dtype, max_seq_len)
        self.rotated = config["qk_rope_head_dim"]
        self.parts = config.get("qk_rope_heads") or 1
        self.rotation = frequencies(config, self.rotated // self.parts, max_seq_len)

    def layers(self, h: torch.Tensor) -> torch.Tensor:
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            h = h + self.latent(self.norm(h, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            x = self.norm(h, f"{layer}.post_attention_layernorm")
            h = h + self.gated(x, f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")
        return h

    @abc.abstractmethod
    def latent(self, x: torch.Tensor, place: str) -> torch.Tensor:
        """Attention with latents: x [n, hidden] -> the same shape."""

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, heads, rotated] by parts, adjacent elements in pairs: put into halves, rotated and put back."""
        n, heads, _ = x.shape
        pairs = x.reshape(n, heads * self.parts, -1, 2).transpose(2, 3).reshape(n, heads * self.parts, -1)
        turned = oracle.rotated(pairs, *self.rotation).reshape(n, heads * self.parts, 2, -1)
        return turned.transpose(2, 3).reshape(x.shape)

    def attended(
        self, q: torch.Tensor, q_turned: torch.Tensor, down: torch.Tensor, up: torch.Tensor, inner: int, scale: float
    ) -> torch.Tensor:
        """Attention of heads whose keys and values are made of the latents in `down` [n, rank + rotated]."""
        n, heads = len(q), self.heads
        latent, k_turned = down.split([up.shape[1], self.rotated], -1)
        made = (latent @ up.T).view(n, heads, -1)
        k = torch.cat([made[..., :inner], self.turned(k_turned[:, None]).expand(-1, heads, -1)], -1)
        scores = torch.einsum("ihd,jhd->hij", torch.cat([q, self.turned(q_turned)], -1), k) * scale
        unseen = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, made[..., inner:]).reshape(n, -1)


class _LlamaMLA(_Oracle):
    def latent(self, x: torch.Tensor, place: str) -> torch.Tensor:
        inner, rank = self.config["qk_nope_head_dim"], self.config["kv_lora_rank"]
        q, q_turned = self.linear(x, f"{place}.q_proj").view(len(x), self.heads, -1).split([inner, self.rotated], -1)
        down = self.linear(x, f"{place}.kv_a_proj_with_mqa")
        if self.config.get("qk_latent_layernorm", True):
            normed = oracle.rms_norm(self.tensors, f"{place}.kv_a_layernorm", down[:, :rank], 1e-6)
            down = torch.cat([normed, down[:, rank:]], -1)
        up = self.tensors[f"{place}.kv_b_proj.weight"]
        mixed = self.attended(q, q_turned, down, up, inner, (inner + self.rotated) ** -0.5)
        return self.linear(mixed, f"{place}.o_proj")


class _Qwen3MLA(_Oracle):
    def latent(self, x: torch.Tensor, place: str) -> torch.Tensor:
        width, eps = self.config["head_dim"], self.config["rms_norm_eps"]
        q, k, v = (self.linear(x, f"{place}.{name}_proj").view(len(x), -1, width) for name in "qkv")
        q, k = (oracle.rms_norm(self.tensors, f"{place}.{name}_norm", one, eps) for name, one in (("q", q), ("k", k)))
        turns = self.tensors[f"{place}.q_rope_proj.weight"].view(self.heads, self.rotated, width)
        down = self.linear(torch.cat([k.flatten(1), v.flatten(1)], 1), f"{place}.kv_a_proj_with_mqa")
        q_turned, up = torch.einsum("nhd,hrd->nhr", q, turns), self.tensors[f"{place}.kv_b_proj.weight"]
        return self.linear(self.attended(q, q_turned, down, up, width, width**-0.5), f"{place}.o_proj")


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    parts = draw.randint(1, 3)
    # Scores grow with hidden size / rank. With sharper attention, rounding in float32 shows in the logits.
    config |= {
        "qk_rope_head_dim": 2 * parts * draw.randint(1, 8),
        "qk_rope_heads": parts,
        "kv_lora_rank": draw.randint(config["hidden_size"] // 4 + 1, 60),
        "rms_norm_eps": random_fields.log(draw, 1e-12, 1.0),
    }
    table = random_fields.rope(draw, {"head_dim": config["qk_rope_head_dim"] // parts}, _ROPES)
    random_fields.spell_rope(config, table, draw)
    return config | random_fields.flags(draw, "attention_bias")


def _random_llama(draw: random.Random) -> dict[str, Any]:
    config = _random(draw)
    config |= {"qk_nope_head_dim": draw.randint(1, 20), "v_head_dim": draw.randint(1, 20)}
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["head_dim"] = config["qk_rope_head_dim"] // config["qk_rope_heads"]
    return config | random_fields.flags(draw, "mlp_bias", "qk_latent_layernorm")


def _tiny(name: str, architecture: str, seed: int, **fields: Any) -> Tiny:
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": name.rpartition("-")[0],
        "hidden_size": 66,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "kv_lora_rank": 26,
        "qk_rope_head_dim": 12,
        "intermediate_size": 53,
        "vocab_size": 379,
        "max_position_embeddings": MAX_SEQ_LEN,
        "rms_norm_eps": 0.016,
        "rope_theta": 811.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    return Tiny(name, {**config, **fields}, seed)


_OF_LLAMA = {"num_key_value_heads": 6, "head_dim": 12, "qk_nope_head_dim": 10, "v_head_dim": 14}
_CUT = {
    "hidden_size": 84,
    "num_attention_heads": 6,
    "intermediate_size": 103,
    "vocab_size": 379,
    "num_hidden_layers": 1,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
}
_OPTIONAL = frozenset({"qk_rope_heads", "attention_bias"})
FAMILIES = (
    Family(
        "llama_mla",
        _LLAMA,
        tiny=(
            _tiny("llama_mla-published", _LLAMA, 3, **_OF_LLAMA, qk_latent_layernorm=True, mlp_bias=True),
            _tiny(
                "llama_mla-parts",
                _LLAMA,
                4,
                **{**_OF_LLAMA, "head_dim": 4},
                qk_rope_heads=3,
                qk_latent_layernorm=False,
                attention_bias=True,
                tie_word_embeddings=True,
                transmla={"source": "Qwen2ForCausalLM"},
            ),
        ),
        weights=lambda config, generator: _around(config, generator, _llama_attention),
        random=_random_llama,
        cut={**_CUT, "num_key_value_heads": 6, "head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 14},
        optional=_OPTIONAL,
        own_optional=frozenset({"qk_latent_layernorm"}),
        bad=(
            ("llama_mla-published", "kv_lora_rank", 0),
            ("llama_mla-published", "head_dim", 10),
            ("llama_mla-published", "q_lora_rank", 20),
            ("llama_mla-published", "num_key_value_heads", 3),
            ("llama_mla-published", "qk_head_dim", 21),
            ("llama_mla-published", "qk_latent_layernorm", "yes"),
            ("llama_mla-parts", "qk_rope_heads", 5),
        ),
        oracle=_LlamaMLA,
    ),
    Family(
        "qwen3_mla",
        _QWEN,
        tiny=(
            _tiny("qwen3_mla-plain", _QWEN, 5, num_key_value_heads=2, head_dim=14, attention_bias=True),
            _tiny(
                "qwen3_mla-parts",
                _QWEN,
                6,
                num_key_value_heads=3,
                head_dim=10,
                qk_rope_heads=2,
                tie_word_embeddings=True,
            ),
        ),
        weights=lambda config, generator: _around(config, generator, _qwen_attention),
        random=_random,
        cut={**_CUT, "num_key_value_heads": 2, "head_dim": 14},
        optional=_OPTIONAL,
        bad=(
            ("qwen3_mla-plain", "kv_lora_rank", "all"),
            ("qwen3_mla-plain", "use_sliding_window", True),
            ("qwen3_mla-parts", "qk_rope_heads", 4),
        ),
        oracle=_Qwen3MLA,
    ),
)
_SIZED = ("heads", "kv_heads", "head_dim", "rank", "rotated")


def _doubled(field: str) -> Change:
    return each(NormedLatentAttentionSpec, lambda one: replace(one, **{field: 2 * getattr(one, field)}))


MUTATIONS = (
    without(LatentAttentionSpec, "q_bias", False),
    without(LatentAttentionSpec, "rope_heads", 1),
    without(NormedLatentAttentionSpec, "rope_heads", 1),
    without(NormedLatentAttentionSpec, "bias", False),
    without(NormedLatentAttentionSpec, "o_bias", False),
    Mutation(
        "scores of the whole width",
        "NormedLatentAttentionSpec.scale",
        some(NormedLatentAttentionSpec, lambda one: True),
        each(NormedLatentAttentionSpec, lambda one: replace(one, scale=(one.head_dim + one.rotated) ** -0.5)),
    ),
)
SIZES: Mapping[str, Change] = {f"NormedLatentAttentionSpec.{name}": _doubled(name) for name in _SIZED}
STORAGE = ("NormedLatentAttentionSpec.names",)
PARTS = tuple(f"NormedLatentAttentionSpec.{name}" for name in ("q_norm", "k_norm", "rotary"))
