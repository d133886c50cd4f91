"""Read the configs of Qwen 2 and 3: Llama with biases of q, k and v (Qwen 2), or with norms of q and k (Qwen 3)."""

from ingot.models.blocks.attention import AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_norm,
    read_windows,
)


def qwen2(config: ConfigReader) -> DecoderSpec:
    return _qwen(config, read_attention(config, bias=True))


def qwen3(config: ConfigReader) -> DecoderSpec:
    norm = read_norm(config)
    # 128 is Qwen3's default, independent of hidden_size / heads (transformers, configuration_qwen3.py).
    return _qwen(config, read_attention(config, head_dim=128, qk_norm=QKNormSpec.of(norm), **read_biases(config)))


def _qwen(config: ConfigReader, attention: AttentionSpec) -> DecoderSpec:
    """Return the spec of a Qwen decoder in which all layers have this attention.

    With `use_sliding_window`, some layers have a window. The field `layer_types` names them. Without it, they are the
    layers from number `max_window_layers` on.
    """
    layers, mlp, norm = count_layers(config), read_gated(config), read_norm(config)
    attentions = [attention] * layers
    if config.flag("use_sliding_window", False):
        types = config.listed("layer_types", layers, ("sliding_attention", "full_attention"))
        if types is None:
            first = config.integer("max_window_layers", 28)
            types = tuple("sliding_attention" if index >= first else "full_attention" for index in range(layers))
        sliding = tuple(kind == "sliding_attention" for kind in types)
        attentions = read_windows(config, attention, sliding, default=4096)
    rope = config.rope(attention.head_dim)
    return read_decoder(config, [pre_norm_layer(one, mlp, norm) for one in attentions], norm, rope)
