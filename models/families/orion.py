"""Read the config of Orion: Llama with layer norms that have biases."""

from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_norm,
    read_rope,
    require_square_heads,
)

_NAMES = DecoderNames(
    unread=(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",),
)


def orion(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Orion describes.

    A missing `num_key_value_heads` means 40 heads, as in the published config class. Null means as many as q heads.
    """
    config.require("attention_bias", (False,), False)
    config = config.within({"num_key_value_heads": 40, **config.fields})
    require_square_heads(config)
    norm = read_norm(config, 1e-5, kind="layer", bias=True)  # its field is still rms_norm_eps
    attention = read_attention(config)
    layer = pre_norm_layer(attention, read_gated(config), norm)
    rope = read_rope(config, attention.head_dim)
    return read_decoder(config, [layer] * count_layers(config), norm, rope, names=_NAMES)
