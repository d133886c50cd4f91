"""Persimmon: q, k and v merged head by head, and everything but the head has a bias (transformers,
modeling_persimmon.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "layer_norm_eps": 0.016,
        "num_key_value_heads": ...,
    }
    return tiny_like_llama(name, "PersimmonForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    drawn = DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.matrix(f"{layer}.self_attn.query_key_value", 3 * hidden, hidden, bias=True)
        drawn.matrix(f"{layer}.self_attn.dense", hidden, hidden, bias=True)
        if config.get("qk_layernorm", True):
            drawn.norm(f"{layer}.self_attn.q_layernorm", hidden // heads, bias=True)
            drawn.norm(f"{layer}.self_attn.k_layernorm", hidden // heads, bias=True)
        drawn.matrix(f"{layer}.mlp.dense_h_to_4h", width, hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.dense_4h_to_h", hidden, width, bias=True)
        drawn.norm(f"{layer}.input_layernorm", hidden, bias=True)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
    drawn.norm("model.final_layernorm", hidden, bias=True)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    head_dim = config.pop("head_dim")
    del config["num_key_value_heads"]
    config["hidden_size"] = config["num_attention_heads"] * head_dim
    config["layer_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config["hidden_act"] = draw.choice(["relu", "relu2", "gelu_new", *random_fields.GELU])
    config["partial_rotary_factor"] = 2 * draw.randint(1, head_dim // 2) / head_dim
    config |= random_fields.flags(draw, "qk_layernorm")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


FAMILIES = (
    Family(
        "persimmon",
        "PersimmonForCausalLM",
        tiny=(
            _tiny("persimmon-normed", 1, hidden_size=84, partial_rotary_factor=0.75),
            _tiny(
                "persimmon-plain",
                2,
                hidden_size=96,
                hidden_act="relu",
                qk_layernorm=False,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_hidden_layers": 1},
        optional=frozenset({"qk_layernorm", "partial_rotary_factor"}),
        bad=(
            ("persimmon-normed", "hidden_size", 85),
            ("persimmon-normed", "head_dim", 16),
            ("persimmon-normed", "qk_layernorm", "yes"),
            ("persimmon-normed", "hidden_act", "silu"),
            ("persimmon-normed", "layer_norm_eps", 0),
            ("persimmon-normed", "partial_rotary_factor", 0.5),
        ),
    ),
)
