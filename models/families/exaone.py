"""EXAONE 4: norms after blocks, norms of q and k, and in a model with windows no rotation where there is none."""

from ingot.models.blocks.attention import QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    post_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_norm,
    read_windows,
)


def exaone4(config: ConfigReader) -> DecoderSpec:
    mlp, norm, layers = read_gated(config), read_norm(config, 1e-5), count_layers(config)
    attention = read_attention(config, qk_norm=QKNormSpec.of(norm))
    attentions = [attention] * layers
    if "sliding_window" not in config.fields or config.integer_or_none("sliding_window"):
        pattern = 4 if config.fields.get("layer_types") else config.integer("sliding_window_pattern", 4)
        sliding = config.sliding_layers(layers, pattern)
        attentions = read_windows(config, attention, sliding, 4096, tables=(None, 0))
    rope = config.rope(attention.head_dim)
    return read_decoder(config, [post_norm_layer(one, mlp, norm) for one in attentions], norm, rope)
