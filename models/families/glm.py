"""Read the configs of GLM and GLM-4: half of a head is rotated, in adjacent pairs; gate and up are one tensor.

GLM-4 adds norms after blocks. GLM-4-MoE has experts, and its rotation is Llama's.
"""

from dataclasses import replace

from ingot.models.blocks.attention import QKNormSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.feed_forward import GatedNames
from ingot.models.blocks.layer import LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_norm,
)
from ingot.models.families.reading_experts import read_sigmoid_experts


def glm(config: ConfigReader) -> DecoderSpec:
    norm = _norm(config)
    return _glm(config, _layer(config, norm), norm)


def glm4(config: ConfigReader) -> DecoderSpec:
    norm = _norm(config)
    layer = _layer(config, norm)
    names = zip(layer.branches, ("post_self_attn_layernorm", "post_mlp_layernorm"), strict=True)
    branches = tuple(replace(branch, post_norm=norm.named(name)) for branch, name in names)
    return _glm(config, replace(layer, branches=branches), norm)


def glm4_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of GLM-4-MoE describes: some dense layers, then layers with experts.

    Experts are chosen by sigmoid scores, with a bias for the choice alone and by groups. One part for all tokens is as
    wide as `n_shared_experts` experts. Layers for multi-token prediction follow the last layer, and Ingot does not use
    them.
    """
    norm, layers, dense = read_norm(config, 1e-5), count_layers(config), read_gated(config)
    attention = read_attention(
        config,
        bias=config.flag("attention_bias", False),
        qk_norm=QKNormSpec.of(norm) if config.flag("use_qk_norm", False) else None,
    )
    shared = config.integer("n_shared_experts", 1)
    sparse = read_sigmoid_experts(config, "n_routed_experts", shared, dense.activation)
    first = config.count("first_k_dense_replace", 1)
    rope = config.within({"partial_rotary_factor": 0.5, **config.fields}).rope(attention.head_dim)
    decoder = [pre_norm_layer(attention, dense if index < first else sparse, norm) for index in range(layers)]
    names = DecoderNames(unread=(*DecoderNames.unread, rf"model\.layers\.{layers}\..*"))
    return read_decoder(config, decoder, norm, rope, names=names)


def _norm(config: ConfigReader) -> NormSpec:
    return read_norm(config, 1.5625e-7)  # transformers, configuration_glm.py


def _layer(config: ConfigReader, norm: NormSpec) -> LayerSpec:
    attention = read_attention(
        config.within({"num_key_value_heads": 2, **config.fields}),
        head_dim=128,
        bias=config.flag("attention_bias", True),
        rotary=RotarySpec(interleaved=True),
    )
    return pre_norm_layer(attention, read_gated(config, names=GatedNames(merged="gate_up_proj")), norm)


def _glm(config: ConfigReader, layer: LayerSpec, norm: NormSpec) -> DecoderSpec:
    """Return the spec of a GLM decoder in which all layers equal `layer`.

    `norm` is the norm before the head. Without `partial_rotary_factor`, half of the elements of a head are rotated.
    """
    rope = config.within({"partial_rotary_factor": 0.5, **config.fields}).rope(config.integer("head_dim", 128))
    return read_decoder(config, [layer] * count_layers(config), norm, rope)
