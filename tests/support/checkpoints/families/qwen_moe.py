"""Qwen 2 and 3 with experts, and some dense layers (transformers, modeling_qwen2_moe.py and modeling_qwen3_moe.py)."""

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
    hidden, experts, head_dim = config["hidden_size"], config["num_experts"], config["head_dim"]
    second = config["model_type"] == "qwen2_moe"

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        mlp = f"{layer}.mlp"
        if index in config.get("mlp_only_layers", ()) or (index + 1) % config.get("decoder_sparse_step", 1):
            expert_weights.gated(drawn, mlp, config["intermediate_size"], hidden)
            return
        drawn.matrix(f"{mlp}.gate", experts, hidden)
        expert_weights.each_expert(drawn, f"{mlp}.experts", experts, config["moe_intermediate_size"], hidden)
        if second:
            width = config["shared_expert_intermediate_size"]
            expert_weights.gated(drawn, f"{mlp}.shared_expert", width, hidden)
            drawn.matrix(f"{mlp}.shared_expert_gate", 1, hidden)

    bias = config.get("attention_bias", False)
    if second:
        has = Layout(qkv_bias=config.get("qkv_bias", True))
    else:
        has = Layout(qkv_bias=bias, o_bias=bias, qk_norms=((head_dim,), (head_dim,)))
    return expert_weights.decoder(config, generator, feed_forward, has)


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw)
    layers = config["num_hidden_layers"]
    config["moe_intermediate_size"] = draw.randint(1, 60)
    config |= random_fields.flags(draw, "norm_topk_prob")
    if draw.random() < 0.4:
        config["decoder_sparse_step"] = draw.randint(1, 3)
    if draw.random() < 0.4:
        config["mlp_only_layers"] = draw.sample(range(layers), draw.randint(0, layers))
    if draw.random() < 0.5:
        config |= {"use_sliding_window": True, "sliding_window": draw.randint(1, 40)}
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


def _random2(draw: random.Random) -> dict[str, Any]:
    config = _random(draw)
    config |= {"shared_expert_intermediate_size": draw.randint(1, 60), **random_fields.flags(draw, "qkv_bias")}
    if config.get("use_sliding_window") and draw.random() < 0.7:
        config["max_window_layers"] = draw.randint(1, 4)
    return config


def _random3(draw: random.Random) -> dict[str, Any]:
    return {**_random(draw), **random_fields.flags(draw, "attention_bias")}


_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 31}
FAMILIES = (
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        tiny=(
            expert_weights.tiny(
                "qwen2_moe-shared",
                "Qwen2MoeForCausalLM",
                0,
                **_EXPERTS,
                shared_expert_intermediate_size=45,
                norm_topk_prob=False,
                mlp_only_layers=[1],
            ),
            expert_weights.tiny(
                "qwen2_moe-window",
                "Qwen2MoeForCausalLM",
                1,
                **_EXPERTS,
                shared_expert_intermediate_size=45,
                norm_topk_prob=True,
                decoder_sparse_step=2,
                qkv_bias=False,
                use_sliding_window=True,
                sliding_window=18,
                max_window_layers=2,
            ),
        ),
        weights=_weights,
        restored=expert_weights.stacked(),
        random=_random2,
        cut={**CUT, **_EXPERTS, "shared_expert_intermediate_size": 45, "mlp_only_layers": []},
        optional=frozenset({"norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "qkv_bias"}),
        bad=(
            ("qwen2_moe-shared", "num_experts_per_tok", 8),
            ("qwen2_moe-shared", "mlp_only_layers", [3]),
            ("qwen2_moe-shared", "mlp_only_layers", 1),
            ("qwen2_moe-shared", "decoder_sparse_step", 0),
            ("qwen2_moe-shared", "norm_topk_prob", "yes"),
            ("qwen2_moe-shared", "qkv_bias", 1),
            ("qwen2_moe-shared", "shared_expert_intermediate_size", 0),
            ("qwen2_moe-window", "layer_types", ["full_attention"]),
        ),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        tiny=(
            expert_weights.tiny("qwen3_moe-plain", "Qwen3MoeForCausalLM", 0, **_EXPERTS, norm_topk_prob=True),
            expert_weights.tiny(
                "qwen3_moe-biased",
                "Qwen3MoeForCausalLM",
                1,
                **_EXPERTS,
                attention_bias=True,
                use_sliding_window=True,
                sliding_window=18,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        restored=expert_weights.stacked(),
        random=_random3,
        cut={**CUT, **_EXPERTS},
        optional=frozenset({"norm_topk_prob"}),
        bad=(
            ("qwen3_moe-plain", "num_experts", 2),
            ("qwen3_moe-plain", "moe_intermediate_size", None),
            ("qwen3_moe-biased", "sliding_window", -1),
        ),
    ),
)
