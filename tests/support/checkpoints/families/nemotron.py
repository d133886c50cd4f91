"""Nemotron: Llama's names, layer norms with gains stored minus one, plain feed-forward parts (transformers,
modeling_nemotron.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from mutations import Mutation, every, some
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family
from ingot.models.blocks.feed_forward import PlainSpec


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "norm_eps": 0.016,
    }
    return tiny_like_llama(name, "NemotronForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    drawn = DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden, bias=True, center=0.0)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=bias)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=bias)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden, bias=True, center=0.0)
        drawn.matrix(f"{layer}.mlp.up_proj", width, hidden, bias=mlp_bias)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, width, bias=mlp_bias)
    drawn.norm("model.norm", hidden, bias=True, center=0.0)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    config["norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config["hidden_act"] = draw.choice(["relu", "relu2", "gelu_new", *random_fields.GELU])
    config["partial_rotary_factor"] = 2 * draw.randint(1, config["head_dim"] // 2) / config["head_dim"]
    config |= random_fields.flags(draw, "attention_bias", "mlp_bias")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


FAMILIES = (
    Family(
        "nemotron",
        "NemotronForCausalLM",
        tiny=(
            _tiny("nemotron-wide", 1, hidden_size=84, head_dim=18, partial_rotary_factor=0.67),
            _tiny(
                "nemotron-biased",
                2,
                hidden_size=96,
                hidden_act="relu",
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "head_dim": 14, "partial_rotary_factor": 0.86, "num_hidden_layers": 1},
        optional=frozenset({"norm_eps", "partial_rotary_factor"}),
        bad=(
            ("nemotron-wide", "norm_eps", 0),
            ("nemotron-wide", "hidden_act", "silu"),
            ("nemotron-wide", "attention_bias", 1),
            ("nemotron-wide", "mlp_bias", "no"),
            ("nemotron-wide", "partial_rotary_factor", 0.4),
        ),
    ),
)
MUTATIONS = (
    Mutation(
        "relu for its square",
        "PlainSpec.activation",
        some(PlainSpec, lambda mlp: mlp.activation == "relu_squared"),
        every(PlainSpec, activation="relu"),
    ),
    Mutation(
        "gelu for relu",
        "PlainSpec.activation",
        some(PlainSpec, lambda mlp: mlp.activation == "relu"),
        every(PlainSpec, activation="gelu"),
    ),
)
