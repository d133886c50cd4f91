"""HunYuan, dense: norms of q and k after their rotation (transformers, modeling_hunyuan_v1_dense.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from mutations import Mutation, every, some
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family
from ingot.models.blocks.attention import QKNormSpec


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "model_type": "hunyuan_v1_dense",
        "hidden_size": 66,
        "head_dim": 14,
        "rms_norm_eps": 0.016,
        "tie_word_embeddings": False,
    }
    return tiny_like_llama(name, "HunYuanDenseV1ForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, width = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    head_dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    bias, drawn = config.get("attention_bias", False), DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=bias)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=bias)
        drawn.norm(f"{layer}.self_attn.query_layernorm", head_dim)
        drawn.norm(f"{layer}.self_attn.key_layernorm", head_dim)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        drawn.matrix(f"{layer}.mlp.gate_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.up_proj", width, hidden)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, width)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config |= random_fields.flags(draw, "attention_bias")
    table = random_fields.rope(draw, config, ("default", "linear", "llama3", "dynamic", "dynamic", "yarn"))
    if table["rope_type"] == "dynamic" and draw.random() < 0.7:
        table["alpha"] = random_fields.log(draw, 0.5, 1000.0)
    random_fields.spell_rope(config, table, draw)
    return config


FAMILIES = (
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        tiny=(
            _tiny(
                "hunyuan-alpha",
                0,
                rope_scaling={"type": "dynamic", "alpha": 7.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                use_qk_norm=True,
                use_cla=False,
            ),
            _tiny("hunyuan-biased", 1, attention_bias=True, tie_word_embeddings=True),
        ),
        weights=_weights,
        random=_random,
        cut={
            "hidden_size": 84,
            "head_dim": 14,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 103,
            "vocab_size": 379,
            "num_hidden_layers": 1,
        },
        bad=(
            ("hunyuan-alpha", "use_qk_norm", False),
            ("hunyuan-alpha", "use_cla", True),
            ("hunyuan-alpha", "mlp_bias", True),
            ("hunyuan-alpha", "partial_rotary_factor", 0.5),
            ("hunyuan-alpha", "hidden_act", "gelu"),
        ),
    ),
)
MUTATIONS = (
    Mutation(
        "norms of q and k before rotation",
        "QKNormSpec.after_rotation",
        some(QKNormSpec, lambda norms: norms.after_rotation),
        every(QKNormSpec, after_rotation=False),
        unless=("llama4_text-chunks", "llama4-parts"),  # a norm without gains, which rotations keep
    ),
)
