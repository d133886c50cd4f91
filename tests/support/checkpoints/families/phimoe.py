"""PhiMoE: layer norms, and two experts by SparseMixer (transformers, modeling_phimoe.py)."""

import random
from collections.abc import Mapping
from typing import Any

import expert_weights
import random_fields
import torch
from drawn_weights import DrawnWeights
from expert_weights import CUT
from mutations import Mutation, every, some
from tiny_checkpoint import MAX_SEQ_LEN
from tiny_weights import Layout

from families.family import Config, Family
from ingot.models.blocks.experts import RouterSpec


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, width, experts = (config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts"))

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        drawn.matrix(f"{layer}.block_sparse_moe.gate", experts, hidden)
        place = f"{layer}.block_sparse_moe.experts"
        expert_weights.each_expert(drawn, place, experts, width, hidden, ("w1", "w3", "w2"))

    bias, head_bias = config.get("attention_bias", False), config.get("lm_head_bias", False)
    has = Layout(qkv_bias=bias, o_bias=bias)
    return expert_weights.decoder(config, generator, feed_forward, has, norm_bias=True, head_bias=head_bias)


def _restored(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stacked = expert_weights.stacked(("w1", "w3", "w2"), "block_sparse_moe")(config, tensors)
    return {name.replace("mlp.gate.", "mlp.router."): one for name, one in stacked.items()}


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="num_local_experts")
    config |= {"num_local_experts": draw.randint(2, 9), "num_experts_per_tok": 2}
    config["router_jitter_noise"] = random_fields.log(draw, 0.001, 2.0)
    if draw.random() < 0.5:
        config["sliding_window"] = draw.randint(1, 40)
    config |= random_fields.flags(draw, "attention_bias", "lm_head_bias")
    config["rope_theta"] = random_fields.log(draw, 2.0, 1e7)
    return config


_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.4}
_LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0],
    "long_factor": [1.5, 2.2, 3.1, 4.7, 6.0, 7.0, 8.0],
    "short_mscale": 1.3,
    "long_mscale": 1.3,
    "original_max_position_embeddings": MAX_SEQ_LEN,
}
FAMILIES = (
    Family(
        "phimoe",
        "PhimoeForCausalLM",
        tiny=(
            expert_weights.tiny(
                "phimoe-biased",
                "PhimoeForCausalLM",
                0,
                **_EXPERTS,
                attention_bias=True,
                lm_head_bias=True,
                sliding_window=17,
            ),
            expert_weights.tiny(
                "phimoe-long",
                "PhimoeForCausalLM",
                1,
                **_EXPERTS,
                rope_scaling=_LONG,
                max_position_embeddings=4 * MAX_SEQ_LEN,
                original_max_position_embeddings=MAX_SEQ_LEN,
            ),
        ),
        weights=_weights,
        restored=_restored,
        random=_random,
        cut={**CUT, **_EXPERTS, "intermediate_size": 53},
        aliases=("PhiMoEForCausalLM",),
        optional=frozenset({"router_jitter_noise", "lm_head_bias"}),
        bad=(
            ("phimoe-biased", "num_experts_per_tok", 3),
            ("phimoe-biased", "num_local_experts", 1),
            ("phimoe-biased", "router_jitter_noise", 0),
            ("phimoe-biased", "lm_head_bias", 1),
            ("phimoe-long", "rope_scaling", {**_LONG, "long_mscale": 1.2}),
            ("phimoe-long", "rope_scaling", {**_LONG, "short_mscale": None}),
        ),
    ),
)
MUTATIONS = (
    Mutation(
        "another jitter",
        "RouterSpec.jitter",
        some(RouterSpec, lambda router: router.jitter is not None),
        every(RouterSpec, jitter=0.01),
    ),
    Mutation(
        "no SparseMixer",
        "RouterSpec.jitter",
        some(RouterSpec, lambda router: router.jitter is not None),
        every(RouterSpec, jitter=None),
    ),
)
