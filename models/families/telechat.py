"""Read the config of TeleChat 2: Llama with other names, and k and v in one tensor.

The rotary base follows from two context lengths.
"""

import math
from dataclasses import replace

from ingot.ir.errors import ConfigError
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.config import MAX_LAYERS, ConfigReader, RopeSpec
from ingot.models.families.reading import pre_norm_layer, read_head, read_norm

_NAMES = DecoderNames("transformer", "h", unread=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",))


def telechat2(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of TeleChat 2 describes.

    Only attention's output linear and the MLP's down linear have biases.
    """
    hidden = config.integer_or_none("n_embed") or config.integer("hidden_size", 4096)
    attention = _attention(config, hidden)
    mlp = GatedSpec(config.integer("ffn_hidden_size", 12288), down_bias=True)
    norm = read_norm(config, 1e-5, "layer_norm_epsilon")
    layer = pre_norm_layer(attention, mlp, norm)
    layer = replace(layer, onto_norm=config.flag("apply_residual_connection_post_layernorm", False))
    of_embedding = norm.named("word_embeddings_layernorm") if config.flag("embed_layernorm", False) else None
    return DecoderSpec(
        vocab=config.integer("vocab_size", 160256),
        hidden=hidden,
        layers=(layer,) * config.integer("n_layer", 30, most=MAX_LAYERS),
        norm=norm.named("ln_f"),
        ropes=(_rope(config, attention.head_dim),),
        embedding=EmbeddingSpec(norm=of_embedding, stored="word_embeddings"),
        head=read_head(config, tied=True),
        names=_NAMES,
    )


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    heads = config.integer("n_head", 32)
    kv_heads = config.integer("num_key_value_heads", heads)
    if hidden % heads or heads % kv_heads or hidden // heads % 2 or hidden == 2 * heads:
        raise ConfigError(
            f"n_head {heads} of hidden_size {hidden}, num_key_value_heads {kv_heads}",
            where=config.source,
            expected="heads of an even size of 4 at least, and a multiple of the heads of k and v",
        )
    names = AttentionNames("self_attention", q="query", merged_kv="key_value", groups=kv_heads, o="dense")
    return AttentionSpec(heads, kv_heads, hidden // heads, o_bias=True, names=names)


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Return the rotary embedding of TeleChat 2: NTK scaling in steps (modeling_telechat2.py, RotaryEmbedding).

    The base is 10000 * alpha ** (head_dim / (head_dim - 2)). alpha is 2 * ratio - 1, but at least 1. The ratio is the
    training length / `base_seqlen`, rounded up to a power of two.
    """
    config.require("rope_scaling", (None,), None)
    config.require("rope_theta", (10000.0,), 10000.0)
    stretch = config.integer("training_seqlen", 8192) / config.integer("base_seqlen")
    # For prompts longer than in training, the published code increases the base further, and scales cosines and sines.
    # Ingot's longest context is the training length.
    alpha = max(2 ** math.ceil(math.log(stretch, 2) + 1) - 1, 1)
    return RopeSpec("default", 10000.0 * alpha ** (head_dim / (head_dim - 2)), head_dim)
