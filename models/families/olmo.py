"""Read the configs of OLMo 1 to 3, and of OLMoE.

OLMo 1 is Llama with clipped q, k and v, and layer norms without weights. OLMo 2 and 3 have norms only after blocks, and
norms over all heads of q and of k. OLMoE has such norms of q and k, and experts.
"""

from ingot.models.blocks.attention import AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import ConfigReader, RopeSpec
from ingot.models.families.reading import (
    SILU,
    count_layers,
    post_norm_layer,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_norm,
    read_two_ropes,
    read_windows,
    require_square_heads,
)
from ingot.models.families.reading_experts import read_counts


def olmo(config: ConfigReader) -> DecoderSpec:
    attention = read_attention(config, clip=config.number_or_none("clip_qkv"), **read_biases(config))
    norm = NormSpec(1e-5, kind="layer", gains=False)  # no field sets epsilon
    layers = [pre_norm_layer(attention, read_gated(config), norm)] * count_layers(config)
    return read_decoder(config, layers, norm, config.rope(attention.head_dim))


def olmo2(config: ConfigReader) -> DecoderSpec:
    attention = _attention(config)
    return _olmo(config, [attention] * count_layers(config), config.rope(attention.head_dim))


def olmo3(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of OLMo 3 describes: OLMo 2 with a window in three of every four layers.

    The fourth one has no window. Only layers without a window have rope scaling.
    """
    sliding, attention = config.sliding_layers(count_layers(config), pattern=4), _attention(config)
    ropes = read_two_ropes(config, attention.head_dim, full=5e5, sliding=5e5)
    return _olmo(config, read_windows(config, attention, sliding, 4096, tables=(0, 1)), *ropes)


def olmoe(config: ConfigReader) -> DecoderSpec:
    config.require("clip_qkv", (None,), None)  # it would clip q and k after their norms
    head_dim, norm = require_square_heads(config), read_norm(config, 1e-5)
    attention = read_attention(config, qk_norm=QKNormSpec.of(norm, over="all heads"), **read_biases(config))
    experts, top_k = read_counts(config, "num_experts")
    router = RouterSpec(top_k, renormalize=config.flag("norm_topk_prob", False))
    activation = config.choice("hidden_act", SILU, "silu")
    layer = pre_norm_layer(
        attention, ExpertsSpec(experts, config.integer("intermediate_size"), router, activation), norm
    )
    return read_decoder(config, [layer] * count_layers(config), norm, config.rope(head_dim))


def _norm(config: ConfigReader) -> NormSpec:
    return read_norm(config, 1e-5, wide=True)


def _attention(config: ConfigReader) -> AttentionSpec:
    return read_attention(config, qk_norm=QKNormSpec.of(_norm(config), over="all heads"), **read_biases(config))


def _olmo(config: ConfigReader, attentions: list[AttentionSpec], *ropes: RopeSpec) -> DecoderSpec:
    mlp, norm = read_gated(config), _norm(config)
    return read_decoder(config, [post_norm_layer(one, mlp, norm) for one in attentions], norm, *ropes)
