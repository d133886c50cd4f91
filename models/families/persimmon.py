"""Read the config of Persimmon: q, k and v merged by heads, norms of q and k, half of a head rotated, plain MLPs."""

from ingot.models.blocks.attention import AttentionNames, AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.feed_forward import PlainNames
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_decoder,
    read_norm,
    read_plain,
    require_square_heads,
)


def persimmon(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Persimmon describes.

    All linears except the head have biases. Without `partial_rotary_factor`, half of the elements of a head are
    rotated.
    """
    norm = read_norm(config, 1e-5, "layer_norm_eps", kind="layer", bias=True)
    heads, head_dim = config.integer("num_attention_heads"), require_square_heads(config)
    qk_norm = QKNormSpec(norm.named("q_layernorm"), norm.named("k_layernorm"))
    attention = AttentionSpec(
        heads,
        heads,
        head_dim,
        bias=True,
        o_bias=True,
        qk_norm=qk_norm if config.flag("qk_layernorm", True) else None,
        names=AttentionNames(o="dense", merged="query_key_value", groups=heads),
    )
    names = PlainNames(up="dense_h_to_4h", down="dense_4h_to_h")
    layer = pre_norm_layer(attention, read_plain(config, "relu2", bias=True, names=names), norm)
    rope = config.within({"partial_rotary_factor": 0.5, **config.fields}).rope(attention.head_dim)
    return read_decoder(config, [layer] * count_layers(config), norm.named("final_layernorm"), rope)
