"""Read the configs of MiniCPM 1, 2 and 4 and of Tele-FLM.

They are Llama with the scale factors of maximal-update parametrisation (muP).
"""

import math

from ingot.ir.errors import ConfigError
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.config import ConfigReader, RopeSpec
from ingot.models.families.reading import (
    PUBLISHED_ROPES,
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
    read_rope,
    require_square_heads,
)


def minicpm(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of MiniCPM describes.

    Results of attention and MLP are scaled by `scale_depth` / sqrt(layers), and logits by `dim_model_base` / hidden
    size.
    """
    config.require("num_experts", (0,), 0)
    config.require("sparse_config", (None,), None)  # MiniCPM 4's block-sparse attention
    require_square_heads(config)
    norm, layers = read_norm(config), count_layers(config)
    depth = config.number("scale_depth", 1.0) / math.sqrt(layers)
    layer = pre_norm_layer(read_attention(config, **read_biases(config)), read_gated(config), norm, scale=depth)
    width = config.number("dim_model_base", 1.0) / config.integer("hidden_size")
    return read_decoder(
        config,
        [layer] * layers,
        norm,
        _minicpm_rope(config),
        head=read_head(config, tied=True, scale=width),
        embedding=EmbeddingSpec(scale=config.number("scale_emb", 1.0)),
    )


def _minicpm_rope(config: ConfigReader) -> RopeSpec:
    """Return the rotary embedding of MiniCPM.

    For type "longrope", the published code computes the factor on cosines and sines from two context lengths. Raises
    ConfigError if the config sets a different factor.
    """
    rope = read_rope(config, require_square_heads(config), (*PUBLISHED_ROPES, "longrope"))
    if rope.rope_type != "longrope":
        return rope
    constants = dict(rope.constants)
    original, scale = constants["original_max_position"], constants["attention_factor"]
    assert isinstance(original, float) and isinstance(scale, float)
    square = 1 + math.log(config.integer("max_position_embeddings", 2048) / original) / math.log(original)
    if square < 0 or not math.isclose(math.sqrt(square), scale, rel_tol=1e-6):
        raise ConfigError(
            f"longrope scales cosines and sines by {scale:g}",
            where=config.source,
            expected=f"no 'factor' or 'attention_factor', and max_position_embeddings of {original:g} at least",
        )
    return rope


def teleflm(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Tele-FLM describes.

    If `use_mup` is true, embeddings and logits are multiplied by factors from the config.
    """
    config.require("aud_depthgpt", (None,), None)  # FLM-Audio's second model
    require_square_heads(config)
    bias = config.flag("attention_bias", False)
    o_bias = bias and not config.flag("disable_att_o_bias", False)
    norm, attention = read_norm(config), read_attention(config, bias=bias, o_bias=o_bias)
    scales: list[float | None] = [None, None]
    if config.flag("use_mup", False):
        output = config.number("output_mult", 1.0) / config.number("mup_scale_factor", 1.0)
        scales = [config.number("input_mult", 1.0), output]
    return read_decoder(
        config,
        [pre_norm_layer(attention, read_gated(config), norm)] * count_layers(config),
        norm,
        read_rope(config, attention.head_dim),
        head=read_head(config, scale=scales[1]),
        embedding=EmbeddingSpec(scale=scales[0]),
    )
