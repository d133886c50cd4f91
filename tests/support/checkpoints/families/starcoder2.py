"""StarCoder2: layer norms and plain feed-forward parts, biases by one flag (transformers, modeling_starcoder2.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "norm_epsilon": 0.016,
        "norm_type": "layer_norm",
        "mlp_type": "default",
    }
    return tiny_like_llama(name, "Starcoder2ForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads", 2)
    bias, drawn = config.get("use_bias", True), DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden, bias=True)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=bias)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=bias)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.c_fc", width, hidden, bias=bias)
        drawn.matrix(f"{layer}.mlp.c_proj", hidden, width, bias=bias)
    drawn.norm("model.norm", hidden, bias=True)
    if not config.get("tie_word_embeddings", True):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    config["norm_epsilon"] = random_fields.log(draw, 1e-12, 1.0)
    config["hidden_act"] = draw.choice(["relu", "relu2", "gelu_new", *random_fields.GELU])
    config["sliding_window"] = draw.choice([None, draw.randint(1, 40)])
    config |= random_fields.flags(draw, "use_bias")
    kinds = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
    random_fields.spell_rope(config, random_fields.rope(draw, config, kinds), draw)
    return config


FAMILIES = (
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        tiny=(
            _tiny("starcoder2-window", 1, hidden_size=84, sliding_window=23),
            _tiny(
                "starcoder2-bare",
                2,
                hidden_size=96,
                num_key_value_heads=3,
                use_bias=False,
                hidden_act="gelu",
                tie_word_embeddings=False,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_hidden_layers": 1},
        optional=frozenset({"norm_epsilon", "norm_type", "mlp_type", "use_bias"}),
        bad=(
            ("starcoder2-window", "use_bias", 1),
            ("starcoder2-window", "norm_type", "rms_norm"),
            ("starcoder2-window", "mlp_type", "gated"),
            ("starcoder2-window", "norm_epsilon", 0),
            ("starcoder2-window", "hidden_act", "silu"),
            ("starcoder2-window", "sliding_window", -1),
        ),
    ),
)
