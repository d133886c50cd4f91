"""OLMoE: norms over all heads of q and of k, and experts (transformers, modeling_olmoe.py)."""

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
    hidden, width, experts = (config[name] for name in ("hidden_size", "intermediate_size", "num_experts"))

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        drawn.matrix(f"{layer}.mlp.gate", experts, hidden)
        expert_weights.each_expert(drawn, f"{layer}.mlp.experts", experts, width, hidden)

    bias, head_dim = config.get("attention_bias", False), hidden // config["num_attention_heads"]
    norms = ((hidden,), (head_dim * config["num_key_value_heads"],))
    return expert_weights.decoder(config, generator, feed_forward, Layout(qkv_bias=bias, o_bias=bias, qk_norms=norms))


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw)
    config["hidden_size"] = config["num_attention_heads"] * config.pop("head_dim")
    config |= random_fields.flags(draw, "attention_bias", "norm_topk_prob")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


_SIZES = {"hidden_size": 84, "head_dim": ..., "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 31}
FAMILIES = (
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        tiny=(
            expert_weights.tiny("olmoe-plain", "OlmoeForCausalLM", 0, **_SIZES, norm_topk_prob=False),
            expert_weights.tiny(
                "olmoe-biased",
                "OlmoeForCausalLM",
                1,
                **_SIZES,
                norm_topk_prob=True,
                attention_bias=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        restored=expert_weights.stacked(),
        random=_random,
        cut={**{name: value for name, value in CUT.items() if name != "head_dim"}, "intermediate_size": 31},
        optional=frozenset({"norm_topk_prob", "clip_qkv"}),
        bad=(
            ("olmoe-plain", "num_experts_per_tok", 7),
            ("olmoe-plain", "clip_qkv", 8.0),
            ("olmoe-plain", "norm_topk_prob", 1),
            ("olmoe-plain", "head_dim", 12),
        ),
    ),
)
