"""Read the configs of EXAONE 3 and 4, and of EXAONE with experts. EXAONE 3 is Llama with other names.

EXAONE 4 has norms after blocks, and norms of q and k. In a model with windows, layers without a window have no rotary
embedding. EXAONE with experts has this attention too, with norms before blocks.
"""

from dataclasses import replace

from ingot.models.blocks.attention import AttentionNames, AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import GatedNames
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.families.reading import (
    count_layers,
    post_norm_layer,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
    read_windows,
)
from ingot.models.families.reading_experts import read_sigmoid_experts

_NAMES = DecoderNames("transformer", "h", unread=(r"transformer\.(h\.\d+\.attn\.attention\.)?rotary(_emb)?\.inv_freq",))
_ATTENTION_NAMES = AttentionNames("attn.attention", o="out_proj")
_GATED_NAMES = GatedNames(gate="c_fc_0", up="c_fc_1", down="c_proj")


def exaone(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of EXAONE 3 describes, read as in vLLM (exaone.py).

    Missing fields have the defaults of EXAONE's config class. Some field names differ from Llama's: `num_layers`,
    `layer_norm_epsilon` and `activation_function`.
    """
    layers = config.integer("num_layers" if "num_layers" in config.fields else "num_hidden_layers", most=MAX_LAYERS)
    config = config.within({**config.fields, "intermediate_size": _width(config)})
    norm = read_norm(config, 1e-6, "layer_norm_epsilon")
    attention = read_attention(config, names=_ATTENTION_NAMES, **read_biases(config))
    bias = config.flag("mlp_bias", False)
    mlp = read_gated(config, activation_field="activation_function", bias=bias, names=_GATED_NAMES)
    branches = (
        BranchSpec("attention", attention, norm.named("ln_1")),
        BranchSpec("mlp", mlp, norm.named("ln_2")),
    )
    spec = read_decoder(
        config,
        [LayerSpec(branches)] * layers,
        norm.named("ln_f"),
        config.rope(attention.head_dim),
        head=read_head(config, tied=True),
        embedding=EmbeddingSpec(stored="wte"),
    )
    return replace(spec, names=_NAMES)


def _width(config: ConfigReader) -> int:
    """Return the width of a feed-forward part: `intermediate_size`, or four times the hidden size."""
    return config.integer_or_none("intermediate_size") or 4 * config.integer("hidden_size")


def exaone4(config: ConfigReader) -> DecoderSpec:
    mlp, norm = read_gated(config), read_norm(config, 1e-5)
    attentions = _attentions(config, norm)
    rope = config.rope(attentions[0].head_dim)
    return read_decoder(config, [post_norm_layer(one, mlp, norm) for one in attentions], norm, rope)


def exaone_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of EXAONE with experts describes.

    The list `mlp_layer_types` names the layers with experts. Without it, they are the layers from number
    `first_k_dense_replace` on. Layers for multi-token prediction are not used.
    """
    dense, norm = read_gated(config), read_norm(config, 1e-5)
    attentions = _attentions(config, norm)
    shared = config.integer("num_shared_experts", 1)
    sparse = read_sigmoid_experts(config, "num_experts", shared, dense.activation)
    types = config.listed("mlp_layer_types", len(attentions), ("dense", "sparse"))
    if types is None:
        first = config.count("first_k_dense_replace", 1)
        types = tuple("dense" if index < first else "sparse" for index in range(len(attentions)))
    layers = [
        pre_norm_layer(attention, dense if kind == "dense" else sparse, norm)
        for attention, kind in zip(attentions, types, strict=True)
    ]
    names = DecoderNames(unread=(*DecoderNames.unread, r"mtp\..*"))
    return read_decoder(config, layers, norm, config.rope(attentions[0].head_dim), names=names)


def _attentions(config: ConfigReader, norm: NormSpec) -> list[AttentionSpec]:
    """Return the attention of each layer of EXAONE 4. `norm` is the spec of the norms of q and k."""
    layers, attention = count_layers(config), read_attention(config, qk_norm=QKNormSpec.of(norm))
    attentions = [attention] * layers
    if "sliding_window" not in config.fields or config.integer_or_none("sliding_window"):
        pattern = 4 if config.fields.get("layer_types") else config.integer("sliding_window_pattern", 4)
        sliding = config.sliding_layers(layers, pattern)
        attentions = read_windows(config, attention, sliding, 4096, tables=(None, 0))
    return attentions
