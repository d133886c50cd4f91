"""Read the configs of Granite and HyperCLOVA X: Llama with factors on embeddings, scores, block results and logits."""

from dataclasses import replace

from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.layer import LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_head,
    read_head_dim,
    read_norm,
)


def granite(config: ConfigReader) -> DecoderSpec:
    attention = read_attention(config, scale=config.number("attention_multiplier", 1.0), **read_biases(config))
    norm = read_norm(config)
    return _granite(config, _layer(config, attention, norm), norm, 1.0 / config.number("logits_scaling", 1.0))


def hyperclovax(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of HyperCLOVA X describes: Granite with norms also after attention and MLP.

    Logits are multiplied by `logits_scaling`. In Granite, they are divided by it.
    """
    scale = config.number("attention_multiplier", read_head_dim(config) ** -0.5)
    norm = read_norm(config)
    layer = _layer(config, read_attention(config, scale=scale, **read_biases(config)), norm)
    if config.flag("use_post_norm", True):
        names = zip(layer.branches, ("post_norm1", "post_norm2"), strict=True)
        layer = replace(layer, branches=tuple(replace(one, post_norm=norm.named(name)) for one, name in names))
    return _granite(config, layer, norm, config.number("logits_scaling", 1.0))


def _layer(config: ConfigReader, attention: AttentionSpec, norm: NormSpec) -> LayerSpec:
    mlp = read_gated(config, bias=config.flag("mlp_bias", False))
    return pre_norm_layer(attention, mlp, norm, scale=config.number("residual_multiplier", 1.0))


def _granite(config: ConfigReader, layer: LayerSpec, norm: NormSpec, logit_scale: float) -> DecoderSpec:
    embedding = EmbeddingSpec(scale=config.number("embedding_multiplier", 1.0))
    head, rope = read_head(config, scale=logit_scale), config.rope(read_head_dim(config))
    return read_decoder(config, [layer] * count_layers(config), norm, rope, head=head, embedding=embedding)
