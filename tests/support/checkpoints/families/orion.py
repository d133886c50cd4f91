"""Orion: Llama's tensors, and norms with biases.

The oracle is written from vLLM's model_executor/models/orion.py, which follows the modeling_orion.py that checkpoints
of OrionStarAI/Orion-14B-Base carry, and from the defaults of their configuration_orion.py.
"""

import random
from collections.abc import Mapping
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from oracle import Oracle, Tensors, attention, gated, layer_norm, linear, rotated, scaled_frequencies
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "hidden_size": 84,
        "rms_norm_eps": 0.016,
    }
    return tiny_like_llama(name, "OrionForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    kv_heads, drawn = config.get("num_key_value_heads", 40) or heads, DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden, bias=True)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * (hidden // heads), hidden)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, hidden)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.gate_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.up_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, width)
    drawn.norm("model.norm", hidden, bias=True)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _oracle(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    heads, eps = config["num_attention_heads"], config.get("rms_norm_eps", 1e-5)
    kv_heads, head_dim = config.get("num_key_value_heads", 40) or heads, config["hidden_size"] // heads
    rates = scaled_frequencies({"max_position_embeddings": 4096, **config}, head_dim, max_seq_len)

    def attended(t: Tensors, place: str, x: torch.Tensor) -> torch.Tensor:
        q = linear(t, f"{place}.q_proj", x).view(len(x), heads, head_dim)
        k, v = (linear(t, f"{place}.{one}_proj", x).view(len(x), kv_heads, head_dim) for one in "kv")
        return linear(t, f"{place}.o_proj", attention(rotated(q, rates), rotated(k, rates), v))

    def logits(t: Tensors, ids: torch.Tensor) -> torch.Tensor:
        h = t["model.embed_tokens.weight"][ids]
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            h = h + attended(t, f"{layer}.self_attn", layer_norm(t, f"{layer}.input_layernorm", h, eps))
            x = layer_norm(t, f"{layer}.post_attention_layernorm", h, eps)
            h = h + gated(t, x, *(f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")))
        head = "model.embed_tokens" if config.get("tie_word_embeddings", False) else "lm_head"
        return linear(t, head, layer_norm(t, "model.norm", h, eps))

    return Oracle(tensors, dtype, logits)


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.square_sizes(draw)
    if config["num_attention_heads"] == config["num_key_value_heads"] and draw.random() < 0.5:
        config["num_key_value_heads"] = None
    return {**config, **random_fields.published_rope(draw, config)}


FAMILIES = (
    Family(
        "orion",
        "OrionForCausalLM",
        tiny=(
            _tiny("orion-normed", 1),
            _tiny(
                "orion-tied",
                2,
                num_key_value_heads=None,
                rope_scaling={"type": "linear", "factor": 2.5},
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"num_hidden_layers": 1},
        oracle=_oracle,
        bad=(
            ("orion-normed", "attention_bias", True),
            ("orion-normed", "rms_norm_eps", 0),
            ("orion-normed", "hidden_act", "gelu"),
        ),
    ),
)
