"""ERNIE 4.5 with experts in some layers, and a bias for their choice (transformers, modeling_ernie4_5_moe.py)."""

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
    hidden, width, experts = (config[name] for name in ("hidden_size", "moe_intermediate_size", "moe_num_experts"))
    bias, end = config.get("use_bias", False), config.get("moe_layer_end_index", -1)
    first, last = config.get("moe_layer_start_index", 1), config["num_hidden_layers"] - 1 if end == -1 else end

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        mlp = f"{layer}.mlp"
        if (index + 1) % config.get("moe_layer_interval", 1) or not first <= index <= last:
            expert_weights.gated(drawn, mlp, config["intermediate_size"], hidden, bias=bias)
            return
        drawn.matrix(f"{mlp}.gate", experts, hidden)
        drawn.tensors[f"{mlp}.moe_statics.e_score_correction_bias"] = drawn.randn(1, experts) * 0.3
        expert_weights.each_expert(drawn, f"{mlp}.experts", experts, width, hidden)
        if shared := config.get("moe_num_shared_experts", 2):
            expert_weights.gated(drawn, f"{mlp}.shared_experts", shared * width, hidden, bias=bias)

    has = Layout(qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return expert_weights.decoder(config, generator, feed_forward, has, head_bias=bias)


def _restored(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stacked: dict[str, torch.Tensor] = expert_weights.stacked()(config, tensors)
    return {name.replace("mlp.moe_statics", "mlp.gate.moe_statics"): one for name, one in stacked.items()}


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, top_k="moe_k", experts="moe_num_experts")
    config |= {"moe_intermediate_size": draw.randint(1, 60), "moe_num_shared_experts": draw.randint(0, 2)}
    if draw.random() < 0.5:
        config |= {"moe_layer_start_index": draw.randint(0, 2), "moe_layer_interval": draw.randint(1, 2)}
    config |= random_fields.flags(draw, "use_bias")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


_EXPERTS = {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 31}
FAMILIES = (
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        tiny=(
            expert_weights.tiny(
                "ernie4_5_moe-shared", "Ernie4_5_MoeForCausalLM", 0, **_EXPERTS, tie_word_embeddings=True
            ),
            expert_weights.tiny(
                "ernie4_5_moe-biased",
                "Ernie4_5_MoeForCausalLM",
                1,
                **_EXPERTS,
                use_bias=True,
                moe_num_shared_experts=0,
                moe_layer_start_index=0,
                moe_layer_end_index=1,
            ),
        ),
        weights=_weights,
        restored=_restored,
        random=_random,
        cut={**CUT, **_EXPERTS, "moe_layer_start_index": 0},
        optional=frozenset(
            {
                "moe_num_shared_experts",
                "moe_layer_start_index",
                "moe_layer_end_index",
                "moe_layer_interval",
                "moe_norm_min",
            }
        ),
        bad=(
            ("ernie4_5_moe-shared", "moe_k", 8),
            ("ernie4_5_moe-shared", "moe_num_experts", 0),
            ("ernie4_5_moe-shared", "moe_layer_interval", 0),
            ("ernie4_5_moe-shared", "moe_layer_start_index", -1),
            ("ernie4_5_moe-shared", "moe_layer_end_index", "last"),
            ("ernie4_5_moe-shared", "moe_norm_min", 0),
        ),
    ),
)
