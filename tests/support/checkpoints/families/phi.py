"""Phi 1 and 2: a part of a head is rotated, and everything has a bias (transformers, modeling_phi.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(name: str, **fields: Any) -> Tiny:
    own = {
        "layer_norm_eps": 0.016,
        "tie_word_embeddings": False,
    }
    return tiny_like_llama(name, "PhiForCausalLM", 1, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    head_dim, kv_heads, drawn = hidden // heads, config["num_key_value_heads"], DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden, bias=True)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=True)
            if config.get("qk_layernorm") and name != "v":
                drawn.norm(f"{layer}.self_attn.{name}_layernorm", head_dim, bias=True)
        drawn.matrix(f"{layer}.self_attn.dense", hidden, heads * head_dim, bias=True)
        drawn.matrix(f"{layer}.mlp.fc1", width, hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.fc2", hidden, width, bias=True)
    drawn.norm("model.final_layernorm", hidden, bias=True)
    drawn.matrix("lm_head", config["vocab_size"], hidden, bias=True)
    if config.get("tie_word_embeddings", False):
        del drawn.tensors["lm_head.weight"]
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    head_dim = config.pop("head_dim")
    config["hidden_size"] = config["num_attention_heads"] * head_dim  # the output projection is square
    config["layer_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config["hidden_act"] = draw.choice(["gelu_new", *random_fields.GELU])
    config["partial_rotary_factor"] = 2 * draw.randint(1, head_dim // 2) / head_dim
    config |= random_fields.flags(draw, "qk_layernorm")
    rope = random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn"))
    random_fields.spell_rope(config, rope, draw)
    return config


FAMILIES = (
    Family(
        "phi",
        "PhiForCausalLM",
        tiny=(
            _tiny("phi-normed", hidden_size=84, partial_rotary_factor=0.75, qk_layernorm=True),
            _tiny("phi-plain", hidden_size=96, hidden_act="gelu"),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_hidden_layers": 1},
        optional=frozenset({"qk_layernorm", "partial_rotary_factor"}),
        bad=(
            ("phi-normed", "qk_layernorm", "yes"),
            ("phi-normed", "hidden_act", "silu"),
            ("phi-normed", "layer_norm_eps", 0),
            ("phi-normed", "partial_rotary_factor", 0.5),
        ),
    ),
)
