"""GraniteMoE: Granite's factors, experts stacked in the checkpoint (transformers, modeling_granitemoe.py)."""

import random
from collections.abc import Mapping
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
        mlp = f"{layer}.block_sparse_moe"
        drawn.matrix(f"{mlp}.router.layer", experts, hidden)
        drawn.stack(f"{mlp}.input_linear.weight", experts, 2 * width, hidden)
        drawn.stack(f"{mlp}.output_linear.weight", experts, hidden, width)

    bias = config.get("attention_bias", False)
    return expert_weights.decoder(config, generator, feed_forward, Layout(qkv_bias=bias, o_bias=bias))


def _restored(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }

    def renamed(name: str) -> str:
        return next((name.replace(old, new) for old, new in names.items() if name.endswith(old)), name)

    return {renamed(name): one for name, one in tensors.items()}


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="num_local_experts")
    for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        if draw.random() < 0.8:
            config[name] = random_fields.log(draw, 0.05, 10.0 if name != "attention_multiplier" else 1.0)
    config |= random_fields.flags(draw, "attention_bias")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
FAMILIES = (
    Family(
        "granitemoe",
        "GraniteMoeForCausalLM",
        tiny=(
            expert_weights.tiny(
                "granitemoe-scaled",
                "GraniteMoeForCausalLM",
                0,
                **_EXPERTS,
                embedding_multiplier=2.6,
                residual_multiplier=0.6,
                attention_multiplier=0.45,
                logits_scaling=0.7,
                attention_bias=True,
            ),
        ),
        weights=_weights,
        restored=_restored,
        random=_random,
        cut={**CUT, **_EXPERTS, "intermediate_size": 53},
        bad=(
            ("granitemoe-scaled", "num_experts_per_tok", 7),
            ("granitemoe-scaled", "residual_multiplier", 0),
        ),
    ),
)
