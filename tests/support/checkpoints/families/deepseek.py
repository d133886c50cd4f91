"""DeepSeek-V2 and V3, GLM-4.7-Flash and Mistral 4: latent attention (transformers, modeling_deepseek_v2.py,
modeling_deepseek_v3.py, modeling_glm4_moe_lite.py and modeling_mistral4.py)."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import expert_weights
import random_fields
import torch
from drawn_weights import DrawnWeights
from mutations import Change, Mutation, Params, always, each, some, without
from tiny_checkpoint import Tiny

from families.family import Config, Family
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec, LatentNames

_V2, _V3, _GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
_MISTRAL = "Mistral4ForCausalLM"
_ROPES = ("default", "linear", "llama3", "yarn")


def _attention(drawn: DrawnWeights, place: str, config: Config) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    inner, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    rank, value, bias = config["kv_lora_rank"], config["v_head_dim"], config.get("attention_bias", False)
    if config["q_lora_rank"] is None:
        drawn.matrix(f"{place}.q_proj", heads * (inner + rotated), hidden)
    else:
        drawn.matrix(f"{place}.q_a_proj", config["q_lora_rank"], hidden, bias=bias)
        drawn.norm(f"{place}.q_a_layernorm", config["q_lora_rank"])
        drawn.matrix(f"{place}.q_b_proj", heads * (inner + rotated), config["q_lora_rank"])
    drawn.matrix(f"{place}.kv_a_proj_with_mqa", rank + rotated, hidden, bias=bias)
    drawn.norm(f"{place}.kv_a_layernorm", rank)
    drawn.matrix(f"{place}.kv_b_proj", heads * (inner + value), rank)
    drawn.matrix(f"{place}.o_proj", hidden, heads * value, bias=bias)
    if (width := config.get("index_head_dim")) is not None:
        drawn.matrix(f"{place}.indexer.wq_b", config["index_n_heads"] * width, config["q_lora_rank"])
        drawn.matrix(f"{place}.indexer.wk", width, hidden)
        drawn.norm(f"{place}.indexer.k_norm", width, bias=True)
        drawn.matrix(f"{place}.indexer.weights_proj", config["index_n_heads"], hidden)


def weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, width, bias = config["hidden_size"], config["moe_intermediate_size"], config.get("mlp_bias", False)
    third, layers = config["model_type"] != "deepseek_v2", config["num_hidden_layers"]
    first = config.get(
        "first_k_dense_replace", {"deepseek_v2": 0, "mistral4": 0, "glm4_moe_lite": 1}.get(config["model_type"], 3)
    )
    kinds = config.get("mlp_layer_types") or ["dense" if index < first else "sparse" for index in range(layers)]
    drawn = DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        _attention(drawn, f"{layer}.self_attn", config)
        shared = width * config.get("n_shared_experts", 1 if third else 2)
        if kinds[index] == "dense":
            expert_weights.gated(drawn, f"{layer}.mlp", config["intermediate_size"], hidden, bias=bias)
        elif config["model_type"] == "mistral4":
            count = config["n_routed_experts"]
            drawn.matrix(f"{layer}.mlp.gate", count, hidden)
            drawn.stack(f"{layer}.mlp.experts.gate_up_proj", count, 2 * width, hidden)
            drawn.stack(f"{layer}.mlp.experts.down_proj", count, hidden, width)
            expert_weights.gated(drawn, f"{layer}.mlp.shared_experts", shared, hidden)
        elif third:
            expert_weights.sigmoid_experts(drawn, f"{layer}.mlp", config["n_routed_experts"], width, hidden, shared)
        else:
            drawn.matrix(f"{layer}.mlp.gate", config["n_routed_experts"], hidden)
            expert_weights.each_expert(drawn, f"{layer}.mlp.experts", config["n_routed_experts"], width, hidden)
            expert_weights.gated(drawn, f"{layer}.mlp.shared_experts", shared, hidden, bias=bias)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _latent_sizes(draw: random.Random) -> dict[str, Any]:
    return {
        "kv_lora_rank": draw.randint(1, 40),
        "q_lora_rank": draw.choice([None, draw.randint(1, 40)]),
        "qk_nope_head_dim": draw.randint(1, 20),
        "qk_rope_head_dim": 2 * draw.randint(1, 10),
        "v_head_dim": draw.randint(1, 20),
    }


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="n_routed_experts") | _latent_sizes(draw)
    config["hidden_size"] = config["num_attention_heads"] * draw.randint(1, 20)
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["first_k_dense_replace"] = draw.randint(0, 2)
    config["n_shared_experts"] = draw.randint(1, 2)
    config["head_dim"] = config["qk_rope_head_dim"]
    table = random_fields.rope(draw, config, _ROPES)
    random_fields.spell_rope(config, table, draw)
    return config | random_fields.flags(draw, "attention_bias")


def _random_v2(draw: random.Random) -> dict[str, Any]:
    config = _random(draw)
    # Transformers views parts of rows as complex numbers, whose places in memory must be even.
    for name in ("kv_lora_rank", "qk_nope_head_dim"):
        config[name] += config[name] % 2
    config |= {"moe_intermediate_size": draw.randint(1, 60), "routed_scaling_factor": random_fields.log(draw, 0.1, 5.0)}
    if draw.random() < 0.5:
        config |= expert_weights.groups(draw, "n_routed_experts", config)
        config["topk_method"] = "group_limited_greedy"
    return config | random_fields.flags(draw, "mlp_bias")


def random_v3(draw: random.Random) -> dict[str, Any]:
    config = _random(draw)
    config |= expert_weights.groups(draw, "n_routed_experts", config)
    return config | random_fields.flags(draw, "norm_topk_prob", "rope_interleave")


def _by_deepseek_v3(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    """Kimi-K2's published code is DeepSeek-V3's, and its README says so. Transformers knows the model by that type."""
    from hf_model import hf_model

    return hf_model({**config, "model_type": "deepseek_v3"}, tensors, dtype, max_seq_len)


def _random_glm(draw: random.Random) -> dict[str, Any]:
    """Transformers reads nothing of `first_k_dense_replace`, which the list of layers implies here."""
    config = random_v3(draw)
    del config["first_k_dense_replace"]
    if draw.random() < 0.7:
        kinds = [draw.choice(("dense", "sparse")) for _ in range(config["num_hidden_layers"])]
        config |= {"mlp_layer_types": kinds, "first_k_dense_replace": [*kinds, "sparse"].index("sparse")}
    return config


def _random_mistral(draw: random.Random) -> dict[str, Any]:
    """Transformers computes the share of a head that is rotated, and rounds it down: it must be whole."""
    config = random_v3(draw)
    for name in ("rope_parameters", "rope_scaling", "rope_theta", "head_dim"):
        config.pop(name, None)
    rotated, width = config["qk_rope_head_dim"], config["qk_rope_head_dim"] + config["qk_nope_head_dim"]
    if int(width * (rotated / width)) != rotated:
        config["qk_nope_head_dim"] = rotated
    table = random_fields.rope(draw, config, ("llama3", "yarn"))
    width = rotated + config["qk_nope_head_dim"]
    table |= {"llama_4_scaling_beta": random_fields.log(draw, 0.01, 2.0), "partial_rotary_factor": rotated / width}
    random_fields.spell_rope(config, table, draw)
    return config


def tiny(name: str, architecture: str, seed: int, **fields: Any) -> Tiny:
    latent = {
        "num_key_value_heads": 6,
        "head_dim": ...,
        "kv_lora_rank": 26,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 31,
        "n_routed_experts": 16,  # the default number of groups divides it
        "num_experts_per_tok": 3,
    }
    return expert_weights.tiny(name, architecture, seed, **{**latent, **fields})


YARN = {
    "type": "yarn",
    "factor": 12.0,
    "original_max_position_embeddings": 40,
    # Four frequencies are rotated. With these, the ramp is from index 1 to 3, and by default from 0 to 1.
    "beta_fast": 0.5,
    "beta_slow": 0.05,
    "mscale": 0.7,
    "mscale_all_dim": 1.9,
}
CUT = {
    **expert_weights.CUT,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 31,
}
# Queries grow too, so the temperature is lower: with sharper attention, rounding in float32 shows in the logits.
_SCALED = {**YARN, "mscale_all_dim": 1.1, "original_max_position_embeddings": 19, "llama_4_scaling_beta": 0.4}
# Fields that both configurations may lack, beside those of all families.
OPTIONAL = frozenset({"first_k_dense_replace", "n_shared_experts"})


def bad(name: str) -> tuple[tuple[str, str, Any], ...]:
    return (
        (name, "num_key_value_heads", 2),
        (name, "head_dim", 14),
        (name, "qk_head_dim", 16),
        (name, "q_lora_rank", 0),
        (name, "kv_lora_rank", "512"),
        (name, "qk_rope_head_dim", -2),
        (name, "qk_nope_head_dim", 0),
        (name, "v_head_dim", 1.5),
        (name, "moe_layer_freq", 2),
        (name, "scoring_func", "tanh"),
        (name, "topk_method", "all"),
        (name, "first_k_dense_replace", -1),
        (name, "num_experts_per_tok", 17),
        (name, "attention_bias", "no"),
        (name, "partial_rotary_factor", 0.5),
    )


FAMILIES = (
    Family(
        "mistral4",
        _MISTRAL,
        tiny=(
            tiny(
                "mistral4-groups",
                _MISTRAL,
                2,
                num_hidden_layers=2,
                q_lora_rank=22,
                rope_theta=...,
                rope_parameters={**_SCALED, "rope_type": "yarn", "rope_theta": 811.0},
                n_group=4,
                topk_group=2,
                routed_scaling_factor=0.7,
                n_shared_experts=2,
            ),
            tiny(
                "mistral4-halves",
                _MISTRAL,
                1,
                q_lora_rank=None,
                rope_scaling={**_SCALED, "partial_rotary_factor": 8 / 18},
                head_dim=18,
                first_k_dense_replace=...,
                rope_interleave=False,
                norm_topk_prob=False,
                routed_scaling_factor=0.6,
                attention_bias=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=weights,
        random=_random_mistral,
        cut={**CUT, "head_dim": 18, "n_routed_experts": 8},
        optional=OPTIONAL | {"norm_topk_prob", "rope_interleave", "n_group", "topk_group"},
        bad=(
            *(one for one in bad("mistral4-groups") if one[1] in ("num_key_value_heads", "q_lora_rank", "v_head_dim")),
            ("mistral4-groups", "head_dim", 8),
            ("mistral4-groups", "n_group", 3),
            ("mistral4-groups", "n_group", 16),
            ("mistral4-groups", "num_experts_per_tok", 17),
            ("mistral4-halves", "rope_scaling", "yarn"),
            ("mistral4-halves", "rope_scaling", YARN),
            ("mistral4-halves", "rope_scaling", {**_SCALED, "llama_4_scaling_beta": -1}),
            ("mistral4-halves", "rope_scaling", {**_SCALED, "original_max_position_embeddings": 0}),
            ("mistral4-halves", "rope_scaling", {**_SCALED, "partial_rotary_factor": 1.0}),
        ),
    ),
    Family(
        "deepseek_v2",
        _V2,
        tiny=(
            tiny("deepseek_v2-lite", _V2, 0, q_lora_rank=None, rope_scaling=YARN, n_shared_experts=2),
            tiny(
                "deepseek_v2-groups",
                _V2,
                1,
                q_lora_rank=22,
                topk_method="group_limited_greedy",
                n_group=4,
                topk_group=2,
                routed_scaling_factor=2.2,
                n_shared_experts=1,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=weights,
        restored=expert_weights.stacked(),
        random=_random_v2,
        cut={**CUT, "n_routed_experts": 8},
        optional=OPTIONAL | {"topk_method", "n_group", "topk_group"},
        bad=(*bad("deepseek_v2-groups"), ("deepseek_v2-groups", "n_group", 3), ("deepseek_v2-lite", "mlp_bias", 1)),
    ),
    Family(
        "deepseek_v3",
        _V3,
        tiny=(
            tiny(
                "deepseek_v3-groups",
                _V3,
                0,
                q_lora_rank=22,
                rope_scaling=YARN,
                n_shared_experts=2,
                n_group=4,
                topk_group=2,
                routed_scaling_factor=1.7,
            ),
            tiny(
                "deepseek_v3-halves",
                _V3,
                1,
                q_lora_rank=None,
                rope_interleave=False,
                norm_topk_prob=False,
                n_shared_experts=1,
                n_group=1,
                topk_group=1,
                routed_scaling_factor=0.6,
                attention_bias=True,
            ),
        ),
        weights=weights,
        restored=expert_weights.stacked(),
        random=random_v3,
        cut={**CUT, "n_routed_experts": 8},
        optional=OPTIONAL | {"norm_topk_prob", "rope_interleave"},
        bad=(
            *bad("deepseek_v3-groups"),
            ("deepseek_v3-groups", "n_group", 3),
            ("deepseek_v3-groups", "n_group", 16),
            ("deepseek_v3-groups", "topk_group", 5),
            ("deepseek_v3-groups", "rope_interleave", 1),
            ("deepseek_v3-groups", "num_nextn_predict_layers", -1),
        ),
    ),
    Family(
        "kimi_k2",
        _V3,
        tiny=(
            tiny(
                "kimi_k2-yarn",
                _V3,
                0,
                q_lora_rank=22,
                rope_scaling={**YARN, "beta_fast": 1.0, "beta_slow": 1.0},
                num_nextn_predict_layers=0,
                n_shared_experts=1,
                n_group=1,
                topk_group=1,
                routed_scaling_factor=2.827,
            ),
        ),
        weights=weights,
        restored=expert_weights.stacked(),
        random=random_v3,
        cut={**CUT, "n_routed_experts": 8},
        optional=OPTIONAL | {"norm_topk_prob", "rope_interleave"},
        bad=bad("kimi_k2-yarn"),
        oracle=_by_deepseek_v3,
    ),
    Family(
        "glm4_moe_lite",
        _GLM,
        tiny=(
            tiny(
                "glm4_moe_lite-listed",
                _GLM,
                0,
                q_lora_rank=22,
                first_k_dense_replace=2,
                mlp_layer_types=["dense", "dense", "sparse"],
                rope_scaling=YARN,
                n_group=4,
                topk_group=2,
                routed_scaling_factor=1.7,
                n_shared_experts=2,
            ),
            tiny(
                "glm4_moe_lite-mixed",
                _GLM,
                1,
                q_lora_rank=None,
                first_k_dense_replace=...,
                mlp_layer_types=["sparse", "dense", "sparse"],
                rope_interleave=False,
                norm_topk_prob=False,
                routed_scaling_factor=0.6,
                attention_bias=True,
                tie_word_embeddings=True,
            ),
        ),
        weights=weights,
        restored=expert_weights.stacked(),
        random=_random_glm,
        cut={**CUT, "n_routed_experts": 8, "mlp_layer_types": ["sparse"]},
        optional=frozenset(
            {"mlp_layer_types", "first_k_dense_replace", "norm_topk_prob", "rope_interleave", "n_shared_experts"}
            | {"n_group", "topk_group"}
        ),
        bad=(
            *bad("glm4_moe_lite-listed"),
            ("glm4_moe_lite-listed", "first_k_dense_replace", 1),
            ("glm4_moe_lite-listed", "mlp_layer_types", ["dense", "sparse"]),
            ("glm4_moe_lite-listed", "mlp_layer_types", ["dense", "mlp", "sparse"]),
            ("glm4_moe_lite-listed", "n_group", 3),
        ),
    ),
)


def _plain_scale(spec: LatentAttentionSpec) -> float:
    return float((spec.inner + spec.rotated) ** -0.5)


def _up_of(params: Params, dims: DecoderSpec) -> None:
    """Each head has the matrix of the next head's values."""
    for name in [name for name in params if name.endswith("v_up")]:
        params[name] = params[name].roll(_first(dims).value_width, 0)


def _first(dims: DecoderSpec) -> LatentAttentionSpec:
    block = dims.layers[0].branches[0].block
    assert isinstance(block, LatentAttentionSpec)
    return block


def _doubled(field: str) -> Change:
    """A size twice as large, where there is one."""

    def change(one: LatentAttentionSpec) -> LatentAttentionSpec:
        size = getattr(one, field)
        return replace(one, **{field: size and 2 * size})

    return each(LatentAttentionSpec, change)


_LATENT = some(LatentAttentionSpec, always)
MUTATIONS = (
    without(LatentAttentionSpec, "bias", False),
    without(LatentAttentionSpec, "q_scale", None),
    without(LatentAttentionSpec, "o_bias", False),
    Mutation(
        "no temperature",
        "LatentAttentionSpec.scale",
        some(LatentAttentionSpec, lambda one: one.scale != _plain_scale(one)),
        each(LatentAttentionSpec, lambda one: replace(one, scale=_plain_scale(one))),
    ),
    Mutation("values of the next head", "LatentAttentionSpec.heads", _LATENT, params=_up_of),
)
SIZES: Mapping[str, Change] = {
    f"LatentAttentionSpec.{name}": _doubled(name)
    for name in ("heads", "inner", "rotated", "value_width", "rank", "q_rank")
}
STORAGE = ("LatentAttentionSpec.names",)
PARTS = ("LatentAttentionSpec.kv_norm", "LatentAttentionSpec.q_norm", "LatentAttentionSpec.rotary")
NAMES = (LatentNames,)
