"""Arcee: Llama without gates (transformers, modeling_arcee.py)."""

import random
from typing import Any

import random_fields
import torch
from tiny_checkpoint import Tiny, tiny_like_llama
from tiny_weights import like_llama

from families.family import Config, Family


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "head_dim": 14,
        "rms_norm_eps": 0.016,
        "rope_theta": ...,
    }
    return tiny_like_llama(name, "ArceeForCausalLM", seed, **{**own, **fields})


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tensors = like_llama(config, generator)
    return {name: tensor for name, tensor in tensors.items() if ".mlp.gate_proj." not in name}


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    # Transformers wants the hidden size to be a multiple of the heads, whatever the size of a head.
    config["hidden_size"] = random_fields.stream_of_heads(draw, config["num_attention_heads"])
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config["hidden_act"] = draw.choice(["relu", "relu2", "gelu_new", *random_fields.GELU])
    config |= random_fields.flags(draw, "attention_bias", "mlp_bias")
    kinds = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
    random_fields.spell_rope(config, random_fields.rope(draw, config, kinds), draw)
    return config


FAMILIES = (
    Family(
        "arcee",
        "ArceeForCausalLM",
        tiny=(
            _tiny(
                "arcee-plain",
                1,
                hidden_size=84,
                rope_theta=811.0,
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 40,
                    "beta_fast": 1.5,
                    "beta_slow": 0.3,
                },
            ),
            _tiny(
                "arcee-biased",
                2,
                hidden_size=96,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
                rope_theta=811.0,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_hidden_layers": 1},
        bad=(
            ("arcee-plain", "hidden_act", "silu"),
            ("arcee-plain", "attention_bias", 1),
            ("arcee-plain", "mlp_bias", "no"),
        ),
    ),
)
