"""Llama 4: chunks, layers without positions, weights on the inputs of experts (transformers, modeling_llama4.py)."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import expert_weights
import random_fields
import torch
from drawn_weights import DrawnWeights
from expert_weights import CUT
from mutations import Mutation, each, every, some, without

from families.family import Config, Family
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.experts import ExpertsSpec
from ingot.models.blocks.positions import PositionScaleSpec

_TEXT, _PARTS = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_ROPES = ("default", "linear", "llama3", "yarn")


def _with_experts(config: Config) -> list[int]:
    listed = config.get("moe_layers")
    step = config.get("interleave_moe_layer_step", 1)
    return list(range(config["num_hidden_layers"]))[step - 1 :: step] if listed is None else listed


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, heads, kv_heads = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim, bias, width = config["head_dim"], config.get("attention_bias", False), config["intermediate_size"]
    drawn, with_experts = DrawnWeights(generator), _with_experts(config)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden, bias=bias)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=bias)
        place = f"{layer}.feed_forward"
        if index not in with_experts:
            expert_weights.gated(drawn, place, config["intermediate_size_mlp"], hidden)
            continue
        count = config["num_local_experts"]
        drawn.matrix(f"{place}.router", count, hidden)
        # Stored as [inputs, outputs].
        for name, outputs, inputs in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            drawn.stack(f"{place}.experts.{name}", count, outputs, inputs)
            drawn.tensors[f"{place}.experts.{name}"] = drawn.tensors[f"{place}.experts.{name}"].mT.contiguous()
        expert_weights.gated(drawn, f"{place}.shared_expert", width, hidden)
    drawn.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, experts="num_local_experts")
    layers = config["num_hidden_layers"]
    config["intermediate_size_mlp"] = draw.randint(1, 200)
    if draw.random() < 0.5:
        config["moe_layers"] = [index for index in range(layers) if draw.random() < 0.6]
    elif draw.random() < 0.7:
        config["interleave_moe_layer_step"] = draw.randint(1, 3)
    if draw.random() < 0.4:
        config["no_rope_layers"] = [draw.randint(0, 1) for _ in range(layers)]
    elif draw.random() < 0.7:
        config["no_rope_layer_interval"] = draw.randint(1, 4)
    if draw.random() < 0.8:
        config["attention_chunk_size"] = draw.choice([None, draw.randint(1, 40), draw.randint(1, 40)])
    if config.get("attention_chunk_size") and draw.random() < 0.4:
        config["layer_types"] = [draw.choice([_CHUNKED, _FULL]) for _ in range(layers)]
    if draw.random() < 0.7:
        config |= {"floor_scale": draw.randint(1, 60), "attn_scale": random_fields.log(draw, 0.01, 2.0)}
    config |= random_fields.flags(draw, "attention_bias", "use_qk_norm", "attn_temperature_tuning")
    random_fields.spell_rope(config, random_fields.rope(draw, config, _ROPES), draw)
    return config


def _weights_of_parts(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """As published, with tensors of the vision model and of its projector."""
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    found = _weights({**config["text_config"], **tied}, generator)
    drawn = DrawnWeights(generator)
    drawn.matrix("vision_model.model.layers.0.self_attn.q_proj", 8, 8, bias=True)
    drawn.matrix("vision_model.patch_embedding.linear", 8, 12)
    drawn.norm("vision_model.layernorm_pre", 8, bias=True)
    drawn.matrix("multi_modal_projector.linear_1", config["text_config"]["hidden_size"], 8)
    return {**{f"language_model.{name}": one for name, one in found.items()}, **drawn.tensors}


def _random_parts(draw: random.Random) -> dict[str, Any]:
    text = _random(draw)
    outside = {name: text.pop(name) for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in text}
    return {"text_config": {"model_type": "llama4_text", **text}, "vocab_size": text["vocab_size"], **outside}


def _text_alone(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    """Transformers' class of the text part, with the tensors that it has in the class of all parts."""
    from hf_model import hf_model

    outside = {"architectures": [_TEXT], "tie_word_embeddings": config.get("tie_word_embeddings", False)}
    prefix = "language_model."
    own = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
    return hf_model({**config["text_config"], **outside}, own, dtype, max_seq_len)


_CHUNKS = expert_weights.tiny(
    "llama4_text-chunks",
    _TEXT,
    4,
    num_hidden_layers=4,
    no_rope_layer_interval=2,
    interleave_moe_layer_step=2,
    intermediate_size_mlp=97,
    attention_chunk_size=21,
    attn_temperature_tuning=True,
    floor_scale=13,
    attn_scale=0.9,
    num_local_experts=5,
    num_experts_per_tok=1,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 6.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 40,
    },
)
_LISTED = expert_weights.tiny(
    "llama4_text-listed",
    _TEXT,
    1,
    no_rope_layers=[0, 1, 1],
    layer_types=[_CHUNKED, _FULL, _CHUNKED],
    moe_layers=[0, 2],
    intermediate_size_mlp=97,
    attention_chunk_size=30,
    attn_temperature_tuning=False,
    use_qk_norm=False,
    attention_bias=True,
    num_local_experts=6,
    num_experts_per_tok=3,
    tie_word_embeddings=True,
)
_CUT = {**CUT, "intermediate_size": 53, "interleave_moe_layer_step": 1}
_OUTSIDE = ("architectures", "torch_dtype", "tie_word_embeddings", "model_type")
_OF_PARTS = {key: value for key, value in _CHUNKS.config.items() if key not in _OUTSIDE}
FAMILIES = (
    Family(
        "llama4_text",
        _TEXT,
        tiny=(_CHUNKS, _LISTED),
        weights=_weights,
        random=_random,
        cut=_CUT,
        optional=frozenset(
            {
                *("no_rope_layers", "moe_layers", "interleave_moe_layer_step", "attention_chunk_size"),
                *("attn_temperature_tuning", "floor_scale", "attn_scale", "intermediate_size_mlp"),
            }
        ),
        bad=(
            ("llama4_text-chunks", "interleave_moe_layer_step", 0),
            ("llama4_text-chunks", "no_rope_layer_interval", 0),
            *(
                ("llama4_text-listed", field, value)
                for field, value in (
                    ("no_rope_layers", [0, 1]),
                    ("no_rope_layers", [0, 1, 2]),
                    ("layer_types", [_CHUNKED, _FULL, "sliding_attention"]),
                    ("attention_chunk_size", None),
                    ("attention_chunk_size", 0),
                    ("attn_temperature_tuning", "yes"),
                    ("floor_scale", 0),
                    ("floor_scale", 8192.5),
                    ("attn_scale", -0.1),
                    ("moe_layers", [3]),
                    ("moe_layers", [True]),
                    ("intermediate_size_mlp", 0),
                    ("num_experts_per_tok", 7),
                    ("num_local_experts", 0),
                    ("use_qk_norm", 1),
                    ("hidden_act", "gelu"),
                )
            ),
        ),
    ),
    Family(
        "llama4",
        _PARTS,
        tiny=(
            replace(
                _CHUNKS,
                name="llama4-parts",
                config={
                    "architectures": [_PARTS],
                    "model_type": "llama4",
                    "text_config": {"model_type": "llama4_text", **_OF_PARTS},
                    "vocab_size": 379,
                    "torch_dtype": "float32",
                },
                seed=3,
            ),
        ),
        weights=_weights_of_parts,
        random=_random_parts,
        cut={"text_config": {"model_type": "llama4_text", **_OF_PARTS, **_CUT}},
        bad=(("llama4-parts", "text_config", None), ("llama4-parts", "text_config", [])),
        oracle=_text_alone,
    ),
)


_CHUNKED_LAYERS = some(AttentionSpec, lambda one: one.chunk)
MUTATIONS = (
    without(ExpertsSpec, "weigh_input", False),
    Mutation("no chunks", "AttentionSpec.chunk", _CHUNKED_LAYERS, every(AttentionSpec, chunk=None)),
    Mutation(
        "chunks one shorter",
        "AttentionSpec.chunk",
        _CHUNKED_LAYERS,
        each(AttentionSpec, lambda one: replace(one, chunk=one.chunk and one.chunk - 1)),
    ),
    Mutation(
        "windows for chunks",
        "AttentionSpec.chunk",
        _CHUNKED_LAYERS,
        each(AttentionSpec, lambda one: replace(one, window=one.chunk, chunk=None)),
    ),
    without(AttentionSpec, "q_scale", None),
    *(
        Mutation(
            f"{what} of queries",
            f"PositionScaleSpec.{field}",
            some(PositionScaleSpec, lambda one: True),
            each(PositionScaleSpec, lambda one, field=field, value=value: replace(one, **{field: value(one)})),
        )
        for what, field, value in (
            ("longer periods", "period", lambda one: one.period + 1),
            ("a weaker growth", "strength", lambda one: one.strength * 0.8),
            ("another shift", "shift", lambda one: 1 - one.shift),
        )
    ),
)
