"""Read the config of Nemotron: layer norms with weights stored minus one, plain MLPs, half of a head rotated."""

from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_norm,
    read_plain,
)


def nemotron(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Nemotron describes.

    Without `partial_rotary_factor`, half of the elements of a head are rotated.
    """
    norm = read_norm(config, 1e-5, "norm_eps", kind="layer", bias=True, offset=1.0)
    attention = read_attention(config, **read_biases(config))
    mlp = read_plain(config, "relu2", bias=config.flag("mlp_bias", False))
    rope = config.within({"partial_rotary_factor": 0.5, **config.fields}).rope(attention.head_dim)
    return read_decoder(config, [pre_norm_layer(attention, mlp, norm)] * count_layers(config), norm, rope)
