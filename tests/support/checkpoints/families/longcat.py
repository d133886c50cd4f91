"""LongCat-Flash: two latent attentions and dense parts a layer, experts next to them that may return their input
(transformers, modeling_longcat_flash.py)."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import expert_weights
import random_fields
import torch
from drawn_weights import DrawnWeights
from mutations import Mutation, Params, each, some, without
from specs import specs
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec
from ingot.models.blocks.shortcut import ShortcutEndSpec

_FLASH = "LongcatFlashForCausalLM"


def _attention(drawn: DrawnWeights, place: str, config: Config) -> None:
    hidden, heads, bias = config["hidden_size"], config["num_attention_heads"], config.get("attention_bias", False)
    inner, rotated, wide = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    drawn.matrix(f"{place}.q_a_proj", config["q_lora_rank"], hidden, bias=bias)
    drawn.norm(f"{place}.q_a_layernorm", config["q_lora_rank"])
    drawn.matrix(f"{place}.q_b_proj", heads * (inner + rotated), config["q_lora_rank"])
    drawn.matrix(f"{place}.kv_a_proj_with_mqa", config["kv_lora_rank"] + rotated, hidden, bias=bias)
    drawn.norm(f"{place}.kv_a_layernorm", config["kv_lora_rank"])
    drawn.matrix(f"{place}.kv_b_proj", heads * (inner + wide), config["kv_lora_rank"])
    drawn.matrix(f"{place}.o_proj", hidden, heads * wide, bias=bias)


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors that are not to be read hold NaN, so that reading them shows."""
    hidden, count, zeros = config["hidden_size"], config["n_routed_experts"], config["zero_expert_num"] or 0
    drawn = DrawnWeights(generator)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_layers"]):
        layer = f"model.layers.{index}"
        for half in (0, 1):
            drawn.norm(f"{layer}.input_layernorm.{half}", hidden)
            drawn.norm(f"{layer}.post_attention_layernorm.{half}", hidden)
            _attention(drawn, f"{layer}.self_attn.{half}", config)
            expert_weights.gated(drawn, f"{layer}.mlps.{half}", config["ffn_hidden_size"], hidden)
        drawn.matrix(f"{layer}.mlp.router.classifier", count + zeros, hidden)
        # As large as scores differ.
        drawn.tensors[f"{layer}.mlp.router.e_score_correction_bias"] = drawn.randn(count + zeros) * 0.05
        width = config["expert_ffn_hidden_size"]
        expert_weights.each_expert(drawn, f"{layer}.mlp.experts", count, width, hidden)
        # Transformers holds and writes these too, and never reads them.
        for expert in range(count, count + zeros):
            for name in ("gate", "up"):
                unread = torch.full((width, hidden), torch.nan)
                drawn.tensors[f"{layer}.mlp.experts.{expert}.{name}_proj.weight"] = unread
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return {**drawn.tensors, "model.mtp.norm.weight": torch.full((hidden,), torch.nan)}


def _restored(config: Config, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers holds them, stacked."""
    kept = {name: one for name, one in tensors.items() if not name.startswith("model.mtp.") and ".experts." not in name}
    for index in range(config["num_layers"]):
        place, count = f"model.layers.{index}.mlp.experts", config["n_routed_experts"]
        both = count + (config["zero_expert_num"] or 0)
        gate, up, down = (
            torch.stack([tensors[f"{place}.{expert}.{name}_proj.weight"] for expert in range(number)])
            for name, number in (("gate", both), ("up", both), ("down", count))
        )
        kept[f"{place}.gate_up_proj"], kept[f"{place}.down_proj"] = torch.cat([gate, up], 1), down
    return kept


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="n_routed_experts", top_k="moe_topk")
    config["num_layers"] = draw.randint(1, 2)
    for name in ("num_hidden_layers", "num_key_value_heads", "head_dim", "intermediate_size"):
        del config[name]
    config |= {
        # Scores grow with hidden size / ranks. With sharper attention, rounding in float32 shows in the logits.
        "q_lora_rank": draw.randint(config["hidden_size"] // 4 + 1, 40),
        "kv_lora_rank": draw.randint(config["hidden_size"] // 4 + 1, 40),
        "qk_nope_head_dim": draw.randint(1, 20),
        "qk_rope_head_dim": 2 * draw.randint(1, 10),
        "v_head_dim": draw.randint(1, 20),
        "ffn_hidden_size": draw.randint(1, 90),
        "expert_ffn_hidden_size": draw.randint(1, 60),
        "zero_expert_num": draw.choice([0, draw.randint(1, 6)]),
        "routed_scaling_factor": random_fields.log(draw, 0.1, 5.0),
    }
    config["n_routed_experts"] += 1
    # Transformers fails with one choice: it squeezes that axis away.
    config["moe_topk"] = draw.randint(2, config["n_routed_experts"] + config["zero_expert_num"])
    config["head_dim"] = config["qk_rope_head_dim"]
    table = random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn"))
    random_fields.spell_rope(config, table, draw)
    return config | random_fields.flags(draw, "attention_bias")


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "hidden_size": 66,
        "num_layers": 2,
        "num_attention_heads": 6,
        # Scores grow with hidden size / ranks: with ranks of a third, rounding in float32 moved log-probabilities by
        # 2e-4 for some prompts, also in transformers.
        "q_lora_rank": 38,
        "kv_lora_rank": 42,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 12,
        "ffn_hidden_size": 53,
        "expert_ffn_hidden_size": 31,
        "n_routed_experts": 5,
        "zero_expert_num": 4,
        "moe_topk": 4,
        "routed_scaling_factor": 2.3,
        "max_position_embeddings": MAX_SEQ_LEN,
        "rms_norm_eps": 0.016,
        "rope_theta": 811.0,
        "tie_word_embeddings": False,
    }
    return tiny(name, _FLASH, seed, **{**own, **fields})


_YARN = {
    "rope_type": "yarn",
    "factor": 12.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 0.5,
    "beta_slow": 0.05,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}
FAMILIES = (
    Family(
        "longcat_flash",
        _FLASH,
        tiny=(
            _tiny("longcat_flash-plain", 0),
            _tiny(
                "longcat_flash-biased",
                1,
                num_layers=1,
                rope_scaling=_YARN,
                attention_bias=True,
                zero_expert_num=2,
                moe_topk=6,
                tie_word_embeddings=True,
            ),
        ),
        weights=_weights,
        restored=_restored,
        random=_random,
        cut={"hidden_size": 84, "num_layers": 1, "vocab_size": 379, "num_attention_heads": 6},
        own_optional=frozenset(
            {"routed_scaling_factor", "expert_ffn_hidden_size", "q_lora_rank", "v_head_dim", "qk_rope_head_dim"}
        ),
        bad=tuple(
            ("longcat_flash-plain", field, value)
            for field, value in (
                ("num_layers", 0),
                ("num_hidden_layers", 2),
                ("num_key_value_heads", 2),
                ("moe_topk", 10),
                ("zero_expert_num", -1),
                ("zero_expert_type", "constant"),
                ("attention_method", "GQA"),
                ("mla_scale_q_lora", False),
                ("mla_scale_kv_lora", False),
                ("router_bias", True),
                ("norm_topk_prob", True),
                ("kv_lora_rank", "512"),
                ("qk_head_dim", 12),
                ("head_dim", 14),
                ("hidden_act", "gelu"),
            )
        ),
    ),
)


def _without_identities(params: Params, dims: DecoderSpec) -> None:
    """Those with weights alone: the router never chooses another expert."""
    count = next(specs(dims, ExpertsSpec)).experts
    for name in [name for name in params if name.endswith("router.choice_bias")]:
        params[name] = params[name].clone()
        params[name][count:] = -10.0


_PAIRS = some(ShortcutEndSpec, lambda one: True)
MUTATIONS = (
    without(LatentAttentionSpec, "kv_factor", None),
    Mutation(
        "no choice of experts that return their input",
        "ExpertsSpec.identities",
        some(ExpertsSpec, lambda one: one.identities and one.router.top_k <= one.experts),
        params=_without_identities,
    ),
    Mutation(
        "the first pair's experts in all pairs",
        "ShortcutEndSpec.start",
        lambda dims: _PAIRS(dims) and len(dims.layers) > 2,
        each(ShortcutEndSpec, lambda one: replace(one, start=0)),
    ),
)
PARTS = ("ShortcutStartSpec.mlp", "ShortcutStartSpec.experts", "ShortcutEndSpec.mlp")
