"""Read the configs of Llama, and of families that differ from it only in biases, windows and rotary embeddings."""

from collections.abc import Sequence
from dataclasses import replace

from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
    read_plain,
    read_windows,
)

# Transformers, configuration_cwm.py.
_CWM_ROPE = {
    "rope_theta": 1e6,
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(
    config: ConfigReader,
    attentions: Sequence[AttentionSpec],
    *,
    mlp_bias: bool = False,
    eps: float = 1e-6,
    wide: bool = False,
    theta: float = 10000.0,
    tied: bool = False,
) -> DecoderSpec:
    """Return the spec of a Llama decoder with the given attentions, one for each layer.

    mlp_bias   whether the linears of the feed-forward part have biases
    eps        epsilon of norms if the config has none
    wide       whether norm weights are float32
    theta      rotary base if the config has none
    tied       whether the head is tied if the config does not say so
    """
    mlp, norm = read_gated(config, bias=mlp_bias), read_norm(config, eps, wide=wide)
    layers = [pre_norm_layer(attention, mlp, norm) for attention in attentions]
    rope = config.rope(attentions[0].head_dim, theta=theta)
    return read_decoder(config, layers, norm, rope, head=read_head(config, tied=tied))


def llama(config: ConfigReader) -> DecoderSpec:
    attention = read_attention(config, **read_biases(config))
    return _llama(config, [attention] * count_layers(config), mlp_bias=config.flag("mlp_bias", False))


def arcee(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Arcee describes: Llama with plain feed-forward parts."""
    attention, norm = read_attention(config, **read_biases(config)), read_norm(config, 1e-5)
    mlp = read_plain(config, "relu2", bias=config.flag("mlp_bias", False))
    layers = [pre_norm_layer(attention, mlp, norm)] * count_layers(config)
    return read_decoder(config, layers, norm, config.rope(attention.head_dim))


def mistral(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Mistral describes: one window for all layers, or none.

    If `sliding_window` is missing, the window is transformers' default, 4096. Null means no window.
    """
    window = config.integer_or_none("sliding_window") if "sliding_window" in config.fields else 4096
    return _llama(config, [read_attention(config, window=window)] * count_layers(config))


def ministral(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Ministral describes: Mistral with a window in some layers, or in all.

    The field `layer_types` names the layers with a window. If it is missing, all layers have one.
    """
    attention, layers = read_attention(config), count_layers(config)
    if "sliding_window" in config.fields and config.integer_or_none("sliding_window") is None:
        return _llama(config, [attention] * layers)
    sliding = config.sliding_layers(layers, pattern=None)
    return _llama(config, read_windows(config, attention, sliding, default=4096))


def cwm(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of CWM describes: Llama with a window in three of every four layers.

    The first of every four layers has no window. Without a field for it, rope scaling is like Llama 3's.
    """
    sliding = config.sliding_layers(count_layers(config), pattern=4, first_full=True)
    if config.fields.get("rope_parameters") is None and config.fields.get("rope_scaling") is None:
        config = config.within({**config.fields, "rope_scaling": _CWM_ROPE})
    attentions = read_windows(config, read_attention(config, head_dim=128), sliding, default=8192)
    return _llama(config, attentions, mlp_bias=config.flag("mlp_bias", False), eps=1e-5, theta=1e6)


def seed_oss(config: ConfigReader) -> DecoderSpec:
    biases = {"bias": config.flag("attention_bias", True), "o_bias": config.flag("attention_out_bias", False)}
    attention = read_attention(config, head_dim=128, **biases)
    return _llama(config, [attention] * count_layers(config), mlp_bias=config.flag("mlp_bias", False))


def helium(config: ConfigReader) -> DecoderSpec:
    bias, rotary = config.flag("attention_bias", False), RotarySpec(interleaved=True)
    attentions = [read_attention(config, head_dim=128, bias=bias, rotary=rotary)] * count_layers(config)
    return _llama(config, attentions, mlp_bias=config.flag("mlp_bias", False), eps=1e-8, wide=True, theta=1e5)


def ernie4_5(config: ConfigReader) -> DecoderSpec:
    bias, rotary = config.flag("use_bias", False), RotarySpec(interleaved=True)
    attention = read_attention(config, head_dim=128, bias=bias, o_bias=bias, rotary=rotary)
    return _llama(config, [attention] * count_layers(config), mlp_bias=bias, eps=1e-5, theta=5e5, tied=True)


def smollm3(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of SmolLM 3 describes: Llama in which some layers have no rotary embedding.

    The list `no_rope_layers` has a 0 for each of these layers. If it is missing, they are every n-th layer, with n from
    `no_rope_layer_interval`.
    """
    layers = count_layers(config)
    rotated = config.listed("no_rope_layers", layers, (0, 1))
    if rotated is None:
        interval = config.integer("no_rope_layer_interval", 4)
        rotated = tuple(int((index + 1) % interval != 0) for index in range(layers))
    sliding = (False,) * layers
    if config.flag("use_sliding_window", False) and config.integer_or_none("sliding_window"):
        types = config.listed("layer_types", layers, ("sliding_attention", "full_attention"))
        sliding = (
            tuple(not keep for keep in rotated) if types is None else tuple(t == "sliding_attention" for t in types)
        )
    windows = read_windows(config, read_attention(config, **read_biases(config)), sliding)
    attentions = [
        replace(attention, rotary=RotarySpec() if keep else None)
        for attention, keep in zip(windows, rotated, strict=True)
    ]
    return _llama(config, attentions, mlp_bias=config.flag("mlp_bias", False), theta=2000000.0, tied=True)
