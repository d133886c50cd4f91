"""HunYuan with experts and a part for all tokens (transformers, modeling_hunyuan_v1_moe.py)."""

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
    hidden, width, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        experts = config["num_experts"]
        drawn.matrix(f"{layer}.mlp.gate.wg", experts, hidden)
        expert_weights.each_expert(drawn, f"{layer}.mlp.experts", experts, width, hidden)
        expert_weights.gated(drawn, f"{layer}.mlp.shared_mlp", width, hidden)

    bias = config.get("attention_bias", False)
    has = Layout(qkv_bias=bias, o_bias=bias, qk_norms=((head_dim,), (head_dim,)))
    names = ("query_layernorm", "key_layernorm")
    return expert_weights.decoder(config, generator, feed_forward, has, qk_names=names)


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, top_k="moe_topk")
    if draw.random() < 0.4:
        config["moe_topk"] = [draw.randint(1, config["num_experts"]) for _ in range(config["num_hidden_layers"])]
    config |= random_fields.flags(draw, "attention_bias")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


_EXPERTS = {"num_experts": 6, "moe_topk": 3}
FAMILIES = (
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        tiny=(
            expert_weights.tiny(
                "hunyuan_v1_moe-alpha",
                "HunYuanMoEV1ForCausalLM",
                0,
                **_EXPERTS,
                rope_scaling={"type": "dynamic", "alpha": 7.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                use_qk_norm=True,
                use_cla=False,
                use_mixed_mlp_moe=True,
                num_shared_expert=1,
                moe_intermediate_size=53,
            ),
            expert_weights.tiny(
                "hunyuan_v1_moe-biased",
                "HunYuanMoEV1ForCausalLM",
                1,
                num_experts=6,
                moe_topk=[1, 2, 3],
                num_shared_expert=[1, 1, 1],
                moe_intermediate_size=[53, 53, 53],
                attention_bias=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        restored=expert_weights.stacked(),
        random=_random,
        cut={**CUT, **_EXPERTS, "intermediate_size": 53, "num_shared_expert": 1, "moe_intermediate_size": 53},
        bad=(
            ("hunyuan_v1_moe-alpha", "moe_topk", 7),
            ("hunyuan_v1_moe-alpha", "moe_topk", [1, 7, 1]),
            ("hunyuan_v1_moe-alpha", "moe_topk", [1, 1]),
            ("hunyuan_v1_moe-alpha", "num_experts", [6, "6", 6]),
            ("hunyuan_v1_moe-alpha", "num_shared_expert", [1, 2, 1]),
            ("hunyuan_v1_moe-alpha", "moe_intermediate_size", 54),
            ("hunyuan_v1_moe-alpha", "use_mixed_mlp_moe", False),
        ),
    ),
)
