"""MiMo-V2-Flash: windows with sinks and more heads of k and v, narrower values (transformers,
modeling_mimo_v2_flash.py)."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import expert_weights
import random_fields
import torch
from drawn_weights import DrawnWeights
from expert_weights import CUT
from mutations import Change, Mutation, each, some, without

from families.family import Config, Family
from ingot.models.blocks.attention import AttentionSpec

_FLASH = "MiMoV2FlashForCausalLM"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The layers that predict further tokens hold NaN, so that reading them shows."""
    hidden, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    width, wide, bias = config["moe_intermediate_size"], config["v_head_dim"], config.get("attention_bias", False)
    types = config.get("layer_types") or [
        _FULL if index == 0 or (index + 1) % 6 == 0 else _SLIDING for index in range(layers)
    ]
    parts = config.get("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
    drawn = DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(layers):
        layer, slides = f"model.layers.{index}", types[index] == _SLIDING
        kv_heads = config["num_key_value_heads"] * (2 if slides else 1)
        drawn.norm(f"{layer}.input_layernorm", hidden)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        for name, rows in (
            ("q", heads * config["head_dim"]),
            ("k", kv_heads * config["head_dim"]),
            ("v", kv_heads * wide),
        ):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", rows, hidden, bias=bias)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, heads * wide)
        if slides:  # as large as scores
            drawn.tensors[f"{layer}.self_attn.attention_sink_bias"] = drawn.randn(heads)
        mlp = f"{layer}.mlp"
        if parts[index] == "dense":
            expert_weights.gated(drawn, mlp, config["intermediate_size"], hidden)
            continue
        count = config["n_routed_experts"]
        drawn.matrix(f"{mlp}.gate", count, hidden)
        drawn.tensors[f"{mlp}.gate.e_score_correction_bias"] = drawn.randn(count) * 0.3
        expert_weights.each_expert(drawn, f"{mlp}.experts", count, width, hidden)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _published(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_weights(config, generator), "model.mtp.layers.0.eh_proj.weight": torch.full((4, 8), torch.nan)}


def _restored(config: Config, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers holds them: without the layers that predict further tokens, and with stacked experts."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.mtp.")}
    return expert_weights.stacked()(config, own)


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="n_routed_experts")
    config |= expert_weights.groups(draw, "n_routed_experts", config)
    config["num_attention_heads"] = 2 * config["num_key_value_heads"] * draw.randint(1, 3)
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    config["v_head_dim"] = draw.randint(1, 40)
    if draw.random() < 0.6:
        config["sliding_window"] = draw.randint(1, 40)
    else:
        config["sliding_window_size"] = draw.randint(1, 40)
    if draw.random() < 0.7:
        config["layer_types"] = [draw.choice([_FULL, _SLIDING]) for _ in range(layers)]
    if draw.random() < 0.7:
        config["mlp_layer_types"] = [draw.choice(["dense", "sparse"]) for _ in range(layers)]
    if draw.random() < 0.8:
        config["attention_value_scale"] = draw.choice([None, random_fields.log(draw, 0.1, 3.0)])
    config |= random_fields.flags(draw, "attention_bias", "norm_topk_prob")
    config["rope_parameters"] = {
        kind: {
            "rope_type": "default",
            "rope_theta": random_fields.log(draw, 2.0, 1e7),
            "partial_rotary_factor": (2 * draw.randint(1, head_dim // 2) + 0.5) / head_dim,
        }
        for kind in (_FULL, _SLIDING)
    }
    for table in config["rope_parameters"].values():
        table["partial_rotary_factor"] = min(table["partial_rotary_factor"], 1.0)
    return config


_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 31, "routed_scaling_factor": 1.7}
_SIZES = {**_EXPERTS, "num_attention_heads": 8, "head_dim": 14, "v_head_dim": 10}
# They rotate 6 and 8 of 14 elements, rounded down.
_ROPES = {
    _FULL: {"rope_type": "default", "rope_theta": 811.0, "partial_rotary_factor": 0.43},
    _SLIDING: {"rope_type": "default", "rope_theta": 37.0, "partial_rotary_factor": 0.63},
}
FAMILIES = (
    Family(
        "mimo_v2_flash",
        _FLASH,
        tiny=(
            expert_weights.tiny(
                "mimo_v2_flash-listed",
                _FLASH,
                0,
                **_SIZES,
                rope_theta=...,
                layer_types=[_SLIDING, _FULL, _SLIDING],
                mlp_layer_types=["sparse", "dense", "sparse"],
                sliding_window_size=17,
                attention_value_scale=0.41,
                n_group=4,
                topk_group=2,
                rope_parameters=_ROPES,
            ),
            expert_weights.tiny(
                "mimo_v2_flash-wide",
                _FLASH,
                1,
                **{**_SIZES, "head_dim": 18, "v_head_dim": 22},
                rope_theta=...,
                sliding_window=21,
                attention_value_scale=1.6,
                attention_bias=True,
                norm_topk_prob=False,
                tie_word_embeddings=True,
            ),
        ),
        weights=_published,
        renamed={"attention_sink_bias": "sinks"},
        restored=_restored,
        random=_random,
        cut={**CUT, **_SIZES, "layer_types": [_SLIDING], "mlp_layer_types": ["sparse"]},
        own_optional=frozenset(
            {
                *("layer_types", "mlp_layer_types", "sliding_window", "sliding_window_size", "attention_value_scale"),
                *("num_key_value_heads", "v_head_dim", "routed_scaling_factor", "norm_topk_prob", "n_group"),
                *("topk_group", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
            }
        ),
        bad=(
            *(
                ("mimo_v2_flash-listed", field, value)
                for field, value in (
                    ("layer_types", [_FULL]),
                    ("layer_types", [_FULL, _FULL, "chunked_attention"]),
                    ("mlp_layer_types", ["dense", "sparse", "experts"]),
                    ("hybrid_layer_pattern", [1, 1, 0]),
                    ("hybrid_layer_pattern", [1, 0, 2]),
                    ("moe_layer_freq", [0, 1, 1]),
                    ("moe_layer_freq", 1),
                    ("num_key_value_heads", 8),
                    ("v_head_dim", 0),
                    ("sliding_window", 16),
                    ("sliding_window_size", 0),
                    ("attention_chunk_size", 40),
                    ("attention_value_scale", 0),
                    ("layernorm_epsilon", 1e-5),
                    ("n_shared_experts", 1),
                    ("scoring_func", "softmax"),
                    ("topk_method", "greedy"),
                    ("n_group", 3),
                    ("swa_num_attention_heads", 4),
                    ("swa_num_key_value_heads", 2),
                    ("swa_head_dim", 12),
                    ("swa_v_head_dim", 14),
                    ("add_full_attention_sink_bias", True),
                    ("add_swa_attention_sink_bias", False),
                    ("rope_parameters", "default"),
                    ("rope_parameters", _ROPES[_FULL]),
                    ("rope_parameters", {**_ROPES, _FULL: {**_ROPES[_FULL], "rope_type": "linear", "factor": 2.0}}),
                )
            ),
            ("mimo_v2_flash-wide", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ),
    ),
)


def _other_width(one: AttentionSpec) -> AttentionSpec:
    return one if one.v_width is None else replace(one, v_width=one.v_width + 1)


SIZES: dict[str, Change] = {"AttentionSpec.v_width": each(AttentionSpec, _other_width)}
MUTATIONS = (
    without(AttentionSpec, "v_scale", None),
    Mutation(
        "values scaled twice",
        "AttentionSpec.v_scale",
        some(AttentionSpec, lambda one: one.v_scale),
        each(AttentionSpec, lambda one: replace(one, v_scale=one.v_scale and one.v_scale**2)),
    ),
    Mutation(
        "the table of layers without a window for all",
        "RotarySpec.table",
        some(AttentionSpec, lambda one: one.v_width and one.rotary and one.rotary.table),
        each(AttentionSpec, lambda one: replace(one, rotary=one.rotary and replace(one.rotary, table=0))),
    ),
)
