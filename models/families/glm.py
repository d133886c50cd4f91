"""Read the configs of GLM and GLM-4: half of a head is rotated, in adjacent pairs; gate and up are one tensor.

GLM-4 adds norms after blocks.
"""

from dataclasses import replace

from ingot.models.blocks.decoder import DecoderSpec
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


def glm(config: ConfigReader) -> DecoderSpec:
    norm = _norm(config)
    return _glm(config, _layer(config, norm), norm)


def glm4(config: ConfigReader) -> DecoderSpec:
    norm = _norm(config)
    layer = _layer(config, norm)
    names = zip(layer.branches, ("post_self_attn_layernorm", "post_mlp_layernorm"), strict=True)
    branches = tuple(replace(branch, post_norm=norm.named(name)) for branch, name in names)
    return _glm(config, replace(layer, branches=branches), norm)


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
