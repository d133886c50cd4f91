"""GLM-4-MoE: sigmoid scores, a bias for the choice, groups (transformers, modeling_glm4_moe.py)."""

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

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        if index < config.get("first_k_dense_replace", 1):
            expert_weights.gated(drawn, f"{layer}.mlp", config["intermediate_size"], hidden)
        else:
            shared = width * config.get("n_shared_experts", 1)
            expert_weights.sigmoid_experts(drawn, f"{layer}.mlp", config["n_routed_experts"], width, hidden, shared)

    has = Layout(
        qkv_bias=config.get("attention_bias", False),
        qk_norms=((head_dim,), (head_dim,)) if config.get("use_qk_norm") else (),
    )
    return expert_weights.decoder(config, generator, feed_forward, has)


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="n_routed_experts")
    config |= expert_weights.groups(draw, "n_routed_experts", config)
    head_dim = config["head_dim"]
    if head_dim % 4 or draw.random() < 0.5:  # half of a head is an even number of elements, or another part is given
        config["partial_rotary_factor"] = 2 * draw.randint(1, head_dim // 2) / head_dim
    config |= {"n_shared_experts": draw.randint(1, 2), "first_k_dense_replace": draw.randint(0, 2)}
    config |= random_fields.flags(draw, "attention_bias", "use_qk_norm", "norm_topk_prob")
    given = {"partial_rotary_factor": 0.5, **config}
    table = random_fields.rope(draw, given, ("default", "linear", "llama3", "yarn"))
    random_fields.spell_rope(config, table, draw)
    return config


_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 31, "routed_scaling_factor": 1.7}
FAMILIES = (
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        tiny=(
            expert_weights.tiny(
                "glm4_moe-groups",
                "Glm4MoeForCausalLM",
                0,
                **_EXPERTS,
                head_dim=16,
                n_group=4,
                topk_group=2,
                n_shared_experts=2,
                use_qk_norm=True,
            ),
            expert_weights.tiny(
                "glm4_moe-biased",
                "Glm4MoeForCausalLM",
                1,
                **_EXPERTS,
                head_dim=16,
                partial_rotary_factor=0.25,
                norm_topk_prob=False,
                first_k_dense_replace=0,
                attention_bias=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        restored=expert_weights.stacked(),
        random=_random,
        cut={**CUT, **_EXPERTS, "head_dim": 12, "first_k_dense_replace": 0},
        optional=frozenset({"norm_topk_prob", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"}),
        bad=(
            ("glm4_moe-groups", "n_group", 3),
            ("glm4_moe-groups", "topk_group", 5),
            ("glm4_moe-groups", "topk_group", 1),
            ("glm4_moe-groups", "n_group", 8),
            ("glm4_moe-groups", "num_experts_per_tok", 9),
            ("glm4_moe-groups", "first_k_dense_replace", -1),
            ("glm4_moe-groups", "routed_scaling_factor", 0),
            ("glm4_moe-groups", "use_qk_norm", 1),
        ),
    ),
)
