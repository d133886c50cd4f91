"""GPT-NeoX: q, k and v are one tensor by heads, a part of a head is rotated (transformers, modeling_gpt_neox.py)."""

import random
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from tiny_checkpoint import Tiny, tiny_like_llama

from families.family import Config, Family


def _tiny(name: str, **fields: Any) -> Tiny:
    own = {
        "hidden_act": "gelu",
        "layer_norm_eps": 0.016,
        "num_key_value_heads": ...,
        "rope_theta": ...,
    }
    return tiny_like_llama(name, "GPTNeoXForCausalLM", 4, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, drawn = config["hidden_size"], DrawnWeights(generator)
    bias = config.get("attention_bias", True)
    drawn.matrix("gpt_neox.embed_in", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden, bias=True)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
        drawn.matrix(f"{layer}.attention.query_key_value", 3 * hidden, hidden, bias=bias)
        drawn.matrix(f"{layer}.attention.dense", hidden, hidden, bias=bias)
        drawn.matrix(f"{layer}.mlp.dense_h_to_4h", config["intermediate_size"], hidden, bias=True)
        drawn.matrix(f"{layer}.mlp.dense_4h_to_h", hidden, config["intermediate_size"], bias=True)
    drawn.norm("gpt_neox.final_layer_norm", hidden, bias=True)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("embed_out", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    head_dim = config.pop("head_dim")
    del config["num_key_value_heads"]
    config["hidden_size"] = config["num_attention_heads"] * head_dim
    config["layer_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config["hidden_act"] = draw.choice(["gelu_new", "gelu_fast", *random_fields.GELU])
    config |= random_fields.flags(draw, "attention_bias", "use_parallel_residual")
    part = 2 * draw.randint(1, head_dim // 2) / head_dim
    sizes = {**config, "partial_rotary_factor": part}
    table = random_fields.rope(draw, sizes, ("default", "linear", "llama3", "yarn"))
    if draw.random() < 0.5:
        return {**config, "rope_parameters": {**table, "partial_rotary_factor": part}}
    config |= {"rotary_pct": part, "rotary_emb_base": table.pop("rope_theta")}
    if table["rope_type"] != "default":
        config["rope_scaling"] = table
    return config


FAMILIES = (
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        tiny=(
            _tiny("gpt_neox-parallel", hidden_size=84, rotary_pct=0.75, rotary_emb_base=811, hidden_act="gelu_fast"),
            _tiny(
                "gpt_neox-sequential",
                hidden_size=96,
                rotary_emb_base=503,
                use_parallel_residual=False,
                attention_bias=False,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_hidden_layers": 1},
        optional=frozenset({"rotary_pct", "rotary_emb_base", "use_parallel_residual"}),
        bad=(
            ("gpt_neox-parallel", "hidden_size", 85),
            ("gpt_neox-parallel", "rotary_pct", "all"),
            ("gpt_neox-parallel", "rotary_emb_base", 0),
            ("gpt_neox-parallel", "use_parallel_residual", "yes"),
            ("gpt_neox-parallel", "attention_bias", 1),
            ("gpt_neox-parallel", "hidden_act", "tanh"),
            ("gpt_neox-parallel", "head_dim", 7),
        ),
        renamed={"embed_out": "lm_head"},
    ),
)
