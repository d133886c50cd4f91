"""Gemma 3n: several streams, LAuReL, embeddings for each layer, shared caches (transformers, modeling_gemma3n.py)."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import random_fields
import torch
from drawn_weights import DrawnWeights
from mutations import Change, Mutation, each, every, some, without
from tiny_checkpoint import Tiny, tiny, tiny_like_llama

from families.family import Config, Family
from ingot.models.blocks.altup import AltUpSpec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.laurel import LaurelSpec
from ingot.models.blocks.per_layer_embedding import PerLayerEmbeddingSpec, PerLayerInputSpec
from ingot.models.blocks.shared_attention import SharedAttentionSpec
from ingot.models.blocks.stream_decoder import StreamDecoderSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"
_TEXT, _PARTS = "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"


def _text(kind: str, seed: int, **fields: Any) -> Tiny:
    own = {"head_dim": 14, "rms_norm_eps": 0.02}
    return tiny_like_llama(f"gemma3n_text-{kind}", _TEXT, seed, **{**own, **fields})


# Both kinds of layers share a cache, and the sliding ones that of no neighbour; tokens above 350 have no embedding for
# layers.
_SHARED = _text(
    "shared",
    2,
    hidden_size=84,
    num_hidden_layers=6,
    intermediate_size=103,
    vocab_size_per_layer_input=350,
    hidden_size_per_layer_input=13,
    altup_num_inputs=3,
    altup_active_idx=1,
    laurel_rank=10,
    layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING],
    num_kv_shared_layers=3,
    sliding_window=21,
    activation_sparsity_pattern=[0.8, 0.0, 0.3, 0.0, 0.6, 0.0],
    final_logit_softcapping=5.0,
    rope_theta=5003.0,
    rope_local_base_freq=311.0,
)
_PLAIN = _text(
    "plain",
    1,
    hidden_size=60,
    num_hidden_layers=2,
    intermediate_size=[71, 64],
    vocab_size_per_layer_input=401,
    hidden_size_per_layer_input=8,
    altup_num_inputs=2,
    altup_correct_scale=False,
    laurel_rank=5,
    layer_types=[_FULL, _SLIDING],
    num_kv_shared_layers=0,
    sliding_window=33,
    hidden_activation="gelu",
    attention_bias=True,
    tie_word_embeddings=False,
    rope_theta=...,
    rope_parameters={
        _FULL: {"rope_type": "linear", "factor": 2.5, "rope_theta": 2003.0},
        _SLIDING: {"rope_type": "default", "rope_theta": 101.0},
    },
)
_OF_PARTS = {name: value for name, value in _SHARED.config.items() if name != "architectures"}
_CUT = {
    "hidden_size": 84,
    "num_hidden_layers": 1,
    "intermediate_size": 103,
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.8],
    "layer_types": [_SLIDING],
}


def _weights(config: Config, generator: torch.Generator, place: str = "model") -> dict[str, torch.Tensor]:
    hidden, layers, heads = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    streams, width = config["altup_num_inputs"], config["hidden_size_per_layer_input"]
    head_dim, kv_heads, bias = config["head_dim"], config["num_key_value_heads"], config.get("attention_bias", False)
    ffn, drawn = config["intermediate_size"], DrawnWeights(generator)
    drawn.matrix(f"{place}.embed_tokens", config["vocab_size"], hidden)
    drawn.matrix(f"{place}.embed_tokens_per_layer", config["vocab_size_per_layer_input"], layers * width)
    drawn.matrix(f"{place}.per_layer_model_projection", layers * width, hidden)
    drawn.norm(f"{place}.per_layer_projection_norm", width)
    for index in range(streams - 1):
        drawn.matrix(f"{place}.altup_projections.{index}", hidden, hidden)
        drawn.matrix(f"{place}.altup_unembed_projections.{index}", hidden, hidden)
    for index in range(layers):
        layer = f"{place}.layers.{index}"
        drawn.norm(f"{layer}.altup.router_norm", hidden)
        # Inputs of the router are divided by the hidden size: a matrix of the usual size would leave its tanh at zero.
        # With larger ones, and sharper attention (scores are not scaled), rounding in float32 shows in the logits.
        drawn.matrix(f"{layer}.altup.modality_router", streams, hidden)
        drawn.tensors[f"{layer}.altup.modality_router.weight"] *= hidden / 6
        drawn.matrix(f"{layer}.altup.prediction_coefs", streams**2, streams)
        drawn.tensors[f"{layer}.altup.prediction_coefs.weight"] *= 0.5
        drawn.matrix(f"{layer}.altup.correction_coefs", streams, streams)
        drawn.tensors[f"{layer}.altup.correct_output_scale"] = 1 + drawn.randn(hidden) * 0.3
        drawn.matrix(f"{layer}.laurel.linear_left", config["laurel_rank"], hidden)
        drawn.matrix(f"{layer}.laurel.linear_right", hidden, config["laurel_rank"])
        drawn.norm(f"{layer}.laurel.post_laurel_norm", hidden)
        drawn.matrix(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, bias=bias)
        drawn.norm(f"{layer}.self_attn.q_norm", head_dim, center=0.5)
        if index < layers - config["num_kv_shared_layers"]:
            for name in ("k_proj", "v_proj"):
                drawn.matrix(f"{layer}.self_attn.{name}", kv_heads * head_dim, hidden, bias=bias)
            drawn.norm(f"{layer}.self_attn.k_norm", head_dim)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=bias)
        own = ffn[index] if isinstance(ffn, list) else ffn
        drawn.matrix(f"{layer}.mlp.gate_proj", own, hidden)
        drawn.matrix(f"{layer}.mlp.up_proj", own, hidden)
        drawn.matrix(f"{layer}.mlp.down_proj", hidden, own)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            drawn.norm(f"{layer}.{name}_layernorm", hidden)
        drawn.matrix(f"{layer}.per_layer_input_gate", width, hidden)
        drawn.matrix(f"{layer}.per_layer_projection", hidden, width)
        drawn.norm(f"{layer}.post_per_layer_input_norm", hidden)
    drawn.norm(f"{place}.norm", hidden)
    if not config.get("tie_word_embeddings", True):
        drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    layers = config["num_hidden_layers"]
    config["hidden_size"] = config["num_attention_heads"] * draw.randint(1, 20)
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    if draw.random() < 0.5:
        config["intermediate_size"] = [draw.randint(1, 200) for _ in range(layers)]
    config["vocab_size_per_layer_input"] = draw.randint(1, 2 * config["vocab_size"])
    config["hidden_size_per_layer_input"] = draw.randint(1, 30)
    config["laurel_rank"] = draw.randint(1, 30)
    config["altup_num_inputs"] = draw.randint(2, 5)
    config["altup_active_idx"] = draw.randrange(config["altup_num_inputs"])
    config["hidden_activation"] = draw.choice(random_fields.GELU)
    config["final_logit_softcapping"] = random_fields.log(draw, 0.5, 100.0)
    config["sliding_window"] = draw.randint(1, 40)
    config |= random_fields.flags(draw, "attention_bias", "altup_correct_scale")
    types = [draw.choice([_FULL, _SLIDING]) for _ in range(layers)]
    if draw.random() < 0.5:
        config["layer_types"] = types
    else:
        types = [_SLIDING] * layers  # every fifth is full, and there are four at most
    shared = draw.randrange(layers)
    config["num_kv_shared_layers"] = shared if {*types[: layers - shared]} == {*types} else 0
    if draw.random() < 0.7:
        config["activation_sparsity_pattern"] = [draw.choice([0.0, draw.random() * 0.99]) for _ in range(layers)]
    if draw.random() < 0.5:
        full = random_fields.rope(draw, config, ("default", "linear", "llama3", "yarn"))
        local = {"rope_type": "default", "rope_theta": random_fields.log(draw, 2.0, 1e7)}
        config["rope_parameters"] = {_FULL: full, _SLIDING: local}
        return config
    rope = random_fields.rope(draw, config, ("default", "linear"))
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_local_base_freq": random_fields.log(draw, 2.0, 1e6)}
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    return config


# The text part of a model that takes images and sound: its tensors lie elsewhere, beside those of the other parts.
_INSIDE = "model.language_model"


def _weights_of_parts(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """As published, with keys and values of layers that have none."""
    text = config["text_config"]
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
    found = _weights({**text, **tied}, generator, _INSIDE)
    layers, drawn = text["num_hidden_layers"], DrawnWeights(generator)
    for index in range(layers - text["num_kv_shared_layers"], layers):
        place, size = f"{_INSIDE}.layers.{index}.self_attn", text["num_key_value_heads"] * text["head_dim"]
        drawn.matrix(f"{place}.k_proj", size, text["hidden_size"])
        drawn.matrix(f"{place}.v_proj", size, text["hidden_size"])
        drawn.norm(f"{place}.k_norm", text["head_dim"])
    drawn.norm("model.vision_tower.timm_model.conv_stem.bn", 8)
    drawn.matrix("model.audio_tower.conformer.0.attention.post", 8, 8)
    drawn.matrix("model.embed_vision.embedding", 16, 8)
    drawn.matrix("model.embed_audio.embedding_projection", text["hidden_size"], 8)
    return {**found, **drawn.tensors}


def _random_parts(draw: random.Random) -> dict[str, Any]:
    text = _random(draw)
    outside = {name: text.pop(name) for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in text}
    return {"text_config": {"model_type": "gemma3n_text", **text}, "vocab_size": text["vocab_size"], **outside}


def _text_alone(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    """Transformers' class of the text part: that of all parts needs the package timm for its vision tower."""
    import transformers

    outside = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    text = transformers.Gemma3nTextConfig(**{**config["text_config"], **outside})
    model = transformers.Gemma3nForCausalLM._from_config(text, dtype=dtype, attn_implementation="eager")
    own = {name.replace(_INSIDE, "model"): tensor for name, tensor in tensors.items() if "_tower" not in name}
    own = {name: tensor for name, tensor in own.items() if "model.embed_vision" not in name}
    own = {name: tensor for name, tensor in own.items() if "model.embed_audio" not in name}
    missing, _ = model.load_state_dict(own, strict=False)
    assert not set(missing) - {"lm_head.weight"}
    model.tie_weights()
    return model


FAMILIES = (
    Family(
        "gemma3n_text",
        _TEXT,
        tiny=(_SHARED, _PLAIN),
        weights=_weights,
        random=_random,
        cut=_CUT,
        optional=frozenset(
            {
                *("vocab_size_per_layer_input", "hidden_size_per_layer_input", "altup_num_inputs", "altup_active_idx"),
                *("laurel_rank", "altup_correct_scale", "rope_local_base_freq", "activation_sparsity_pattern"),
            }
        ),
        bad=tuple(
            ("gemma3n_text-shared", field, value)
            for field, value in (
                ("altup_num_inputs", 1),
                ("altup_active_idx", 3),
                ("altup_active_idx", True),
                ("num_kv_shared_layers", 6),
                ("num_kv_shared_layers", 5),
                ("num_kv_shared_layers", -1),
                ("intermediate_size", [103] * 5),
                ("intermediate_size", [103] * 5 + ["wide"]),
                ("activation_sparsity_pattern", 0.5),
                ("activation_sparsity_pattern", [0.5] * 5 + [1.0]),
                ("vocab_size_per_layer_input", 0),
                ("hidden_activation", "silu"),
                ("laurel_rank", 0),
                ("altup_correct_scale", 1),
                ("rope_local_base_freq", -1.0),
            )
        ),
    ),
    Family(
        "gemma3n",
        _PARTS,
        tiny=(
            tiny(
                "gemma3n-parts", _PARTS, 3, text_config=_OF_PARTS, bos_token_id=..., eos_token_id=..., pad_token_id=...
            ),
        ),
        weights=_weights_of_parts,
        random=_random_parts,
        cut={"text_config": {**_OF_PARTS, **_CUT}},
        bad=(("gemma3n-parts", "text_config", None), ("gemma3n-parts", "text_config", [])),
        oracle=_text_alone,
    ),
)


MUTATIONS = (
    without(AttentionSpec, "v_norm", None),
    without(GatedSpec, "cutoff", None),
    Mutation(
        "the cache of the first layer",
        "SharedAttentionSpec.source",
        some(SharedAttentionSpec, lambda one: one.source),
        every(SharedAttentionSpec, source=0),
    ),
    Mutation(
        "the first stream computed",
        "AltUpSpec.active",
        some(AltUpSpec, lambda altup: altup.active),
        every(AltUpSpec, active=0),
    ),
    Mutation(
        "the last stream layer left out",
        "StreamDecoderSpec.layers",
        some(StreamDecoderSpec, lambda dims: True),
        each(StreamDecoderSpec, lambda dims: replace(dims, layers=dims.layers[:-1])),
    ),
    Mutation(
        "corrected stream not scaled",
        "PerLayerInputSpec.scaled",
        some(PerLayerInputSpec, lambda one: one.scaled),
        every(PerLayerInputSpec, scaled=False),
    ),
    Mutation(
        "exact gelu of the gate of a layer's own embedding",
        "PerLayerInputSpec.activation",
        some(PerLayerInputSpec, lambda one: one.activation == "gelu_tanh"),
        every(PerLayerInputSpec, activation="gelu"),
        moved=2 * 1e-4,  # the two differ by 5e-4 at most
    ),
)


def _wider(dims: StreamDecoderSpec) -> StreamDecoderSpec:
    """Embeddings for layers of another width, in the table and in every layer."""
    for kind in (PerLayerEmbeddingSpec, PerLayerInputSpec):
        dims = each(kind, lambda one: replace(one, width=1 + one.width))(dims)
    return dims


SIZES: dict[str, Change] = {
    "StreamDecoderSpec.hidden": each(StreamDecoderSpec, lambda one: replace(one, hidden=2 * one.hidden)),
    "StreamDecoderSpec.vocab": each(StreamDecoderSpec, lambda one: replace(one, vocab=2 * one.vocab)),
    "AltUpSpec.streams": each(AltUpSpec, lambda one: replace(one, streams=one.streams + 1)),
    "LaurelSpec.rank": each(LaurelSpec, lambda one: replace(one, rank=2 * one.rank)),
    "PerLayerEmbeddingSpec.rows": each(PerLayerEmbeddingSpec, lambda one: replace(one, rows=2 * one.rows)),
    "PerLayerEmbeddingSpec.layers": each(PerLayerEmbeddingSpec, lambda one: replace(one, layers=1 + one.layers)),
    "PerLayerEmbeddingSpec.width": _wider,
    "PerLayerInputSpec.width": _wider,
}
STORAGE = ("StreamDecoderSpec.names",)
PARTS = (
    *(f"StreamDecoderSpec.{name}" for name in ("altup", "inputs", "norm", "ropes", "embedding", "head")),
    *(f"StreamLayerSpec.{name}" for name in ("attention", "mlp", "altup", "laurel", "input", "norm")),
    *("SharedAttentionSpec.attention", "LaurelSpec.norm", "AltUpSpec.norm"),
    *("PerLayerEmbeddingSpec.norm", "PerLayerInputSpec.norm"),
)
