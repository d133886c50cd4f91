"""Read the configs of Granite and HyperCLOVA X: Llama with factors on embeddings, scores, block results and logits.

GraniteMoE has experts in place of feed-forward parts.
"""

from dataclasses import replace

from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.expert_names import ExpertNames
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec
from ingot.models.blocks.layer import LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    SILU,
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
from ingot.models.families.reading_experts import read_counts


def granite(config: ConfigReader) -> DecoderSpec:
    attention = read_attention(config, scale=config.number("attention_multiplier", 1.0), **read_biases(config))
    norm = read_norm(config)
    return _granite(config, _layer(config, attention, norm), norm, 1.0 / config.number("logits_scaling", 1.0))


def granitemoe(config: ConfigReader) -> DecoderSpec:
    experts, top_k = read_counts(config, "num_local_experts")
    mlp = ExpertsSpec(
        experts,
        config.integer("intermediate_size"),
        RouterSpec(top_k, renormalize=True, stored="router.layer"),
        config.choice("hidden_act", SILU, "silu"),
        place="block_sparse_moe",
        names=ExpertNames(gate_up="input_linear.weight", down="output_linear.weight"),
    )
    attention = read_attention(config, scale=config.number("attention_multiplier", 1.0), **read_biases(config))
    norm, scale = read_norm(config), config.number("residual_multiplier", 1.0)
    layer = pre_norm_layer(attention, mlp, norm, scale=scale)
    return _granite(config, layer, norm, 1.0 / config.number("logits_scaling", 1.0))


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
