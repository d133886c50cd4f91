"""Read the configs of Phi 1 to 3. All rotate a part of a head.

Phi 1 and 2 have attention and a plain feed-forward part in parallel after one layer norm. Phi 3 is Llama with merged
tensors.
"""

from ingot.models.blocks.attention import AttentionNames, QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.feed_forward import GatedNames, PlainNames, PlainSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    PLAIN,
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
)


def phi(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Phi 1 or 2 describes.

    Without `partial_rotary_factor`, half of the elements of a head are rotated.
    """
    norm = read_norm(config, 1e-5, "layer_norm_eps", kind="layer", bias=True)
    qk_norm = QKNormSpec(norm.named("q_layernorm"), norm.named("k_layernorm"))
    attention = read_attention(
        config,
        bias=True,
        o_bias=True,
        qk_norm=qk_norm if config.flag("qk_layernorm", False) else None,
        names=AttentionNames(o="dense"),
    )
    activation = config.choice("hidden_act", PLAIN, "gelu_new")
    width, names = config.integer("intermediate_size"), PlainNames(up="fc1", down="fc2")
    branches = (
        BranchSpec("attention", attention, norm.named("input_layernorm")),
        BranchSpec("mlp", PlainSpec(width, activation, bias=True, names=names)),  # it reads attention's input
    )
    layers = [LayerSpec(branches, parallel=True)] * count_layers(config)
    rope = config.within({"partial_rotary_factor": 0.5, **config.fields}).rope(attention.head_dim)
    return read_decoder(config, layers, norm.named("final_layernorm"), rope, head=read_head(config, bias=True))


def phi3(config: ConfigReader) -> DecoderSpec:
    window, norm = config.integer_or_none("sliding_window"), read_norm(config, 1e-5)
    attention = read_attention(config, window=window, names=AttentionNames(merged="qkv_proj"))
    layer = pre_norm_layer(attention, read_gated(config, names=GatedNames(merged="gate_up_proj")), norm)
    return read_decoder(config, [layer] * count_layers(config), norm, config.rope(attention.head_dim))
