"""GLM and GLM-4: gate and up are one tensor, a part of a head is rotated (transformers, modeling_glm.py and
modeling_glm4.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(name: str, architecture: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "hidden_size": 66,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "rms_norm_eps": 0.016,
        "tie_word_embeddings": False,
    }
    return tiny_like_llama(name, architecture, seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    head_dim, kv_heads = config.get("head_dim", 128), config.get("num_key_value_heads", 2)
    bias, drawn = config.get("attention_bias", True), DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=bias)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        drawn.matrix(f"{layer}.mlp.gate_up_proj", 2 * width, hidden)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, width)
        if config["model_type"] == "glm4":
            drawn.norm(f"{layer}.post_self_attn_layernorm", hidden)
            drawn.norm(f"{layer}.post_mlp_layernorm", hidden)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    head_dim = config["head_dim"]
    if head_dim % 4 or draw.random() < 0.5:  # half of a head is an even number of elements, or another part is given
        config["partial_rotary_factor"] = 2 * draw.randint(1, head_dim // 2) / head_dim
    config |= random_fields.flags(draw, "attention_bias")
    table = random_fields.rope(
        draw, {"partial_rotary_factor": 0.5, **config}, ("default", "linear", "llama3", "dynamic", "yarn")
    )
    random_fields.spell_rope(config, table, draw)
    return config


_CUT = {
    "hidden_size": 84,
    "head_dim": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 103,
    "vocab_size": 379,
    "num_hidden_layers": 1,
}
FAMILIES = (
    Family(
        "glm",
        "GlmForCausalLM",
        tiny=(
            _tiny("glm-half", "GlmForCausalLM", 0),
            _tiny(
                "glm-quarter",
                "GlmForCausalLM",
                1,
                attention_bias=False,
                partial_rotary_factor=0.25,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut=_CUT,
        bad=(
            ("glm-half", "attention_bias", "yes"),
            ("glm-half", "hidden_act", "gelu"),
            ("glm-half", "partial_rotary_factor", 0.2),
        ),
    ),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        tiny=(_tiny("glm4-posts", "Glm4ForCausalLM", 0),),
        weights=_weights,
        random=_random,
        cut=_CUT,
        bad=(("glm4-posts", "attention_bias", "yes"), ("glm4-posts", "rms_norm_eps", 0)),
    ),
)
