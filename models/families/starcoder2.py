"""Read the config of StarCoder2: Llama with layer norms, plain feed-forward parts, and biases in all linears."""

from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.feed_forward import PlainNames
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_head,
    read_norm,
    read_plain,
)


def starcoder2(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of StarCoder2 describes. All layers have the same window, or none."""
    config.require("norm_type", ("layer_norm",), "layer_norm")
    config.require("mlp_type", ("default",), "default")
    config.require("activation_function", (None, "gelu"), None)  # a duplicate of hidden_act, which is read
    bias, window = config.flag("use_bias", True), config.integer_or_none("sliding_window")
    config = config.within({"num_key_value_heads": 2, **config.fields})
    attention = read_attention(config, bias=bias, o_bias=bias, window=window)
    mlp = read_plain(config, "gelu_pytorch_tanh", bias=bias, names=PlainNames(up="c_fc", down="c_proj"))
    norm = read_norm(config, 1e-5, "norm_epsilon", kind="layer", bias=True)
    layers = [pre_norm_layer(attention, mlp, norm)] * count_layers(config)
    return read_decoder(config, layers, norm, config.rope(attention.head_dim), head=read_head(config, tied=True))
