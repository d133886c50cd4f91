"""GPT-OSS: sinks, windows, experts with biases and a clamped gate (transformers, modeling_gpt_oss.py)."""

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
    """Matrices of experts are [inputs, outputs]; sinks are as large as scores."""
    hidden, width, experts = (config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts"))

    def feed_forward(drawn: DrawnWeights, layer: str, index: int) -> None:
        drawn.tensors[f"{layer}.self_attn.sinks"] = drawn.randn(config["num_attention_heads"])
        mlp = f"{layer}.mlp"
        drawn.matrix(f"{mlp}.router", experts, hidden, bias=True)
        for name, outputs, inputs in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
            drawn.stack(f"{mlp}.experts.{name}_proj", experts, outputs, inputs)
            drawn.tensors[f"{mlp}.experts.{name}_proj"] = drawn.tensors[f"{mlp}.experts.{name}_proj"].mT.contiguous()
            drawn.tensors[f"{mlp}.experts.{name}_proj_bias"] = drawn.randn(experts, outputs) * 0.3

    bias = config.get("attention_bias", True)
    return expert_weights.decoder(config, generator, feed_forward, Layout(qkv_bias=bias, o_bias=bias))


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="num_local_experts")
    config["sliding_window"] = draw.randint(1, 40)
    if draw.random() < 0.7:
        config |= {"swiglu_limit": random_fields.log(draw, 0.2, 9.0), "swiglu_alpha": random_fields.log(draw, 0.5, 3.0)}
    if draw.random() < 0.5:
        kinds = ["full_attention", "sliding_attention"]
        config["layer_types"] = [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]
    config |= random_fields.flags(draw, "attention_bias")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn")), draw)
    return config


_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 0.9, "swiglu_alpha": 1.2}
FAMILIES = (
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        tiny=(
            expert_weights.tiny(
                "gpt_oss-yarn",
                "GptOssForCausalLM",
                0,
                **_EXPERTS,
                sliding_window=18,
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 1.5,
                    "beta_slow": 0.3,
                    "truncate": False,
                    "original_max_position_embeddings": 40,
                },
            ),
            expert_weights.tiny(
                "gpt_oss-unbiased",
                "GptOssForCausalLM",
                1,
                **_EXPERTS,
                sliding_window=18,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
                attention_bias=False,
                rope_theta=...,
                rope_parameters={"rope_type": "default", "rope_theta": 811.0},
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={**CUT, **_EXPERTS, "intermediate_size": 53},
        optional=frozenset({"swiglu_limit", "swiglu_alpha"}),
        bad=(
            ("gpt_oss-yarn", "num_experts_per_tok", 6),
            ("gpt_oss-yarn", "experts_per_token", 3),
            ("gpt_oss-yarn", "initial_context_length", 4096),
            ("gpt_oss-yarn", "swiglu_limit", 0),
            ("gpt_oss-yarn", "swiglu_alpha", "1.7"),
            ("gpt_oss-yarn", "layer_types", ["full_attention"]),
        ),
    ),
)
