"""Mixtral: experts in place of feed-forward parts (transformers, modeling_mixtral.py)."""

import random
from typing import Any

import expert_weights
import random_fields
import torch
from drawn_weights import DrawnWeights
from expert_weights import CUT
from tiny_weights import Layout

from families.family import Config, Family


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, width, experts = (config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts"))

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        drawn.matrix(f"{layer}.block_sparse_moe.gate", experts, hidden)
        place = f"{layer}.block_sparse_moe.experts"
        expert_weights.each_expert(drawn, place, experts, width, hidden, ("w1", "w3", "w2"))

    return expert_weights.decoder(config, generator, feed_forward, Layout())


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="num_local_experts")
    if draw.random() < 0.5:
        config["sliding_window"] = draw.randint(1, 40)
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


FAMILIES = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        tiny=(
            expert_weights.tiny(
                "mixtral-window", "MixtralForCausalLM", 0, num_local_experts=5, num_experts_per_tok=2, sliding_window=21
            ),
        ),
        weights=_weights,
        restored=expert_weights.stacked(("w1", "w3", "w2"), "block_sparse_moe"),
        random=_random,
        cut={**CUT, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 53},
        bad=(
            ("mixtral-window", "num_experts_per_tok", 6),
            ("mixtral-window", "num_experts_per_tok", 0),
            ("mixtral-window", "num_local_experts", "many"),
            ("mixtral-window", "num_local_experts", 1 << 20),
            ("mixtral-window", "hidden_act", "gelu"),
            ("mixtral-window", "attention_bias", True),
        ),
    ),
)
