"""OLMo 1: Llama's names, norms without tensors, and limits of q, k and v (transformers, modeling_olmo.py)."""

import random
from dataclasses import replace
from typing import Any

import random_fields
import torch
from mutations import Mutation, each, some, without
from tiny_checkpoint import Tiny, tiny_like_llama
from tiny_weights import like_llama

from families.family import Config, Family
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.norm import NormSpec


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    return tiny_like_llama(name, "OlmoForCausalLM", seed, **fields)


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Where head and embedding are two tables, embeddings are so small that the epsilon of norms shows beside them."""
    tensors = like_llama({**config, "mlp_bias": False}, generator)
    if not config.get("tie_word_embeddings", False):
        tensors["model.embed_tokens.weight"] *= 0.02
    return {name: tensor for name, tensor in tensors.items() if "norm" not in name}


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    if draw.random() < 0.5:
        config["hidden_size"] = config["num_attention_heads"] * config.pop("head_dim")
    config["clip_qkv"] = draw.choice([None, random_fields.log(draw, 0.05, 8.0)])
    config |= random_fields.flags(draw, "attention_bias")
    kinds = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
    random_fields.spell_rope(config, random_fields.rope(draw, config, kinds), draw)
    return config


FAMILIES = (
    Family(
        "olmo",
        "OlmoForCausalLM",
        tiny=(
            _tiny("olmo-clipped", 1, hidden_size=84, clip_qkv=0.8, attention_bias=True),
            _tiny("olmo-plain", 2, hidden_size=96, tie_word_embeddings=True),
        ),
        weights=_weights,
        random=_random,
        cut={"hidden_size": 84, "num_hidden_layers": 1},
        optional=frozenset({"clip_qkv"}),
        bad=(
            ("olmo-clipped", "clip_qkv", 0),
            ("olmo-clipped", "clip_qkv", "8"),
            ("olmo-clipped", "attention_bias", 1),
            ("olmo-clipped", "hidden_act", "gelu"),
        ),
    ),
)
MUTATIONS = (
    without(AttentionSpec, "clip", None),
    Mutation(
        "norms without gains",
        "NormSpec.gains",
        some(NormSpec, lambda norm: norm.gains),
        each(NormSpec, lambda norm: replace(norm, gains=False, offset=0.0)),
    ),
)
