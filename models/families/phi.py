"""Phi 3: Llama with merged tensors, and with rotation of a part of a head."""

from ingot.models.blocks.attention import AttentionNames
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.feed_forward import GatedNames
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_norm,
)


def phi3(config: ConfigReader) -> DecoderSpec:
    window, norm = config.integer_or_none("sliding_window"), read_norm(config, 1e-5)
    attention = read_attention(config, window=window, names=AttentionNames(merged="qkv_proj"))
    layer = pre_norm_layer(attention, read_gated(config, names=GatedNames(merged="gate_up_proj")), norm)
    return read_decoder(config, [layer] * count_layers(config), norm, config.rope(attention.head_dim))
