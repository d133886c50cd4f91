"""EXAONE with experts: layers without a window have no rotation (transformers, modeling_exaone_moe.py)."""

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
    hidden, width, head_dim = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    first, types = config.get("first_k_dense_replace", 1), config.get("mlp_layer_types")

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        if types[index] == "dense" if types else index < first:
            expert_weights.gated(drawn, f"{layer}.mlp", config["intermediate_size"], hidden)
        else:
            shared = width * config.get("num_shared_experts", 1)
            expert_weights.sigmoid_experts(drawn, f"{layer}.mlp", config["num_experts"], width, hidden, shared)

    has = Layout(qk_norms=((head_dim,), (head_dim,)))
    return expert_weights.decoder(config, generator, feed_forward, has)


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw)
    layers = config["num_hidden_layers"]
    config |= expert_weights.groups(draw, "num_experts", config)
    config |= {"num_shared_experts": draw.randint(1, 2), "sliding_window": draw.randint(1, 40)}
    if draw.random() < 0.5:
        config["mlp_layer_types"] = [draw.choice(["dense", "sparse"]) for _ in range(layers)]
    else:
        config["first_k_dense_replace"] = draw.randint(0, 2)
    if draw.random() < 0.5:
        config["sliding_window_pattern"] = draw.randint(1, 4)
    config |= random_fields.flags(draw, "norm_topk_prob")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 31, "routed_scaling_factor": 1.7}
FAMILIES = (
    Family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        tiny=(
            expert_weights.tiny(
                "exaone_moe-window",
                "ExaoneMoeForCausalLM",
                0,
                **_EXPERTS,
                n_group=3,
                topk_group=2,
                sliding_window=14,
                sliding_window_pattern=3,
                num_shared_experts=2,
            ),
        ),
        weights=_weights,
        restored=expert_weights.stacked(),
        random=_random,
        cut={**CUT, **_EXPERTS, "first_k_dense_replace": 0},
        optional=frozenset({"mlp_layer_types", "num_shared_experts"}),
        bad=(
            ("exaone_moe-window", "num_experts_per_tok", 7),
            ("exaone_moe-window", "n_group", 4),
            ("exaone_moe-window", "topk_group", 4),
            ("exaone_moe-window", "mlp_layer_types", ["dense", "sparse"]),
            ("exaone_moe-window", "sliding_window_pattern", "LLLG"),
        ),
    ),
)
