"""Read the config of MPT: ALiBi, and layer norms and linears without biases."""

from ingot.ir.errors import ConfigError
from ingot.models.blocks.alibi import AlibiSpec
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import PlainNames, PlainSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.families.reading import read_head

_NAMES = DecoderNames("transformer", "blocks", unread=())


def mpt(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of MPT describes.

    Raises ConfigError for fields that transformers accepts but ignores (modeling_mpt.py).
    """
    config.require("expansion_ratio", (4,), 4)
    config.require("no_bias", (True,), True)
    config.require("logit_scale", (None,), None)
    config.require("norm_type", ("low_precision_layernorm", "layernorm"), "low_precision_layernorm")
    hidden = config.integer("d_model", config.integer("hidden_size", 2048))
    layers = config.integer("n_layers", config.integer("num_hidden_layers", 24, most=MAX_LAYERS), most=MAX_LAYERS)
    norm = NormSpec(config.number("layer_norm_epsilon", 1e-5), kind="layer", wide=True)  # torch's, which rounds once
    branches = (
        BranchSpec("attention", _attention(config, hidden), norm.named("norm_1")),
        BranchSpec("mlp", PlainSpec(4 * hidden, "gelu", names=PlainNames("ffn")), norm.named("norm_2")),
    )
    return DecoderSpec(
        vocab=config.integer("vocab_size", 50368),
        hidden=hidden,
        layers=(LayerSpec(branches),) * layers,
        norm=norm.named("norm_f"),
        embedding=EmbeddingSpec(stored="wte"),
        head=read_head(config, tied=True),
        names=_NAMES,
    )


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    heads = config.integer("n_heads", config.integer("num_attention_heads", 16))
    if hidden % heads:
        raise ConfigError(f"d_model {hidden} over n_heads {heads}", where=config.source, expected="a multiple")
    fields = config.fields.get("attn_config")
    if not isinstance(fields, dict | None):
        raise config.error("attn_config", "an object")
    own = config.within(fields or {}, f"{config.source}, attn_config")
    own.require("alibi", (True,), True)  # without it the model has no position information
    own.require("attn_type", ("multihead_attention",), "multihead_attention")
    own.require("kv_n_heads", (heads,), heads)
    own.require("sliding_window_size", (-1,), -1)
    for flag in ("prefix_lm", "qk_ln", "qk_gn", "attn_uses_sequence_id", "rope"):
        own.require(flag, (False,), False)
    return AttentionSpec(
        heads,
        heads,
        hidden // heads,
        rotary=None,
        alibi=AlibiSpec(flattest=own.number("alibi_bias_max", 8.0)),
        clip=own.number_or_none("clip_qkv"),
        scale=own.number_or_none("softmax_scale"),
        names=AttentionNames("attn", o="out_proj", merged="Wqkv"),
    )
