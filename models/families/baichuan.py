"""Read the configs of Baichuan 1 and 2: Llama with q, k and v in one tensor.

The larger model of each generation has ALiBi. Both Baichuan 2 models divide the rows of the head by their lengths.
"""

from dataclasses import replace

from ingot.ir.errors import ConfigError
from ingot.models.blocks.alibi import AlibiSpec
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.config import ConfigReader, RopeSpec
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
    read_rope,
    require_square_heads,
)

_NAMES = AttentionNames(merged="W_pack")
_ROTARY_WIDTH = 4096  # of the 7B models, which use rotary embeddings (vLLM, baichuan.py)
_VOCAB_1, _VOCAB_2 = 64000, 125696


def baichuan_7b(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Baichuan 1 7B describes."""
    return _rotary(config, normed=False)


def baichuan(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Baichuan 1 13B, or of Baichuan 2 7B or 13B, describes.

    These models share an architecture name. The vocabulary size and the hidden size tell them apart.
    """
    normed = _is_second(config)
    if config.integer("hidden_size") == _ROTARY_WIDTH:
        return _rotary(config, normed)
    return _baichuan(config, replace(_attention(config), rotary=None, alibi=AlibiSpec()), normed)


def _is_second(config: ConfigReader) -> bool:
    """Return whether the model is a Baichuan 2, not a Baichuan 1.

    It is one if it has the vocabulary size of Baichuan 2 or the field `z_loss_weight`. Raises ConfigError for a
    vocabulary size of neither.
    """
    vocab = config.integer("vocab_size")
    second = vocab == _VOCAB_2 or "z_loss_weight" in config.fields
    if not second and vocab != _VOCAB_1:
        raise ConfigError(
            f"vocab_size {vocab} is neither Baichuan 1's nor Baichuan 2's",
            where=config.source,
            expected=f"{_VOCAB_1}, {_VOCAB_2}, or the field 'z_loss_weight', which Baichuan 2 has",
        )
    return second


def _rotary(config: ConfigReader, normed: bool) -> DecoderSpec:
    config.require("rope_theta", (10000.0,), 10000.0)
    attention = _attention(config)
    return _baichuan(config, attention, normed, read_rope(config, attention.head_dim, ("default",)))


def _attention(config: ConfigReader) -> AttentionSpec:
    require_square_heads(config)
    attention = read_attention(config, names=_NAMES)
    if attention.kv_heads != attention.heads:
        raise config.error("num_key_value_heads", f"{attention.heads}, as many as heads of q")
    return attention


def _baichuan(config: ConfigReader, attention: AttentionSpec, normed: bool, *ropes: RopeSpec) -> DecoderSpec:
    if normed:
        config.require("tie_word_embeddings", (False,), False)
    norm = read_norm(config)
    layer = pre_norm_layer(attention, read_gated(config), norm)
    return read_decoder(config, [layer] * count_layers(config), norm, *ropes, head=read_head(config, normed=normed))
