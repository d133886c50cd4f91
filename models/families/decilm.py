"""Read the configs of DeciLM and Nemotron-NAS. In DeciLM, a Llama, layers differ in the number of k/v heads.

In Nemotron-NAS, each layer has its own attention and feed-forward part, a linear map in place of one, or none.
"""

from typing import Any

from ingot.ir.errors import ConfigError
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.layer import BlockSpec, BranchSpec, LayerSpec
from ingot.models.blocks.linear_part import LinearPartSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import MAX_SIZE, ConfigReader
from ingot.models.families.reading import (
    SILU,
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_norm,
)

_WIDTH_STEP = 256  # to which `ffn_mult` is rounded up (modeling_decilm.py, _ffn_mult_to_intermediate_size)


def decilm(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of DeciLM or Nemotron-NAS describes. They share an architecture name.

    With the field `block_configs`, it is a Nemotron-NAS.
    """
    # Other values mean other rotated pairs (vLLM, nemotron_nas.py).
    config.require("position_embedding_type", ("rope",), "rope")
    norm, layers = read_norm(config, 1e-5), count_layers(config)
    if config.fields.get("block_configs") is not None:
        specs = _blocks(config, norm, layers)
    else:
        specs = _by_heads(config, norm, layers)
    attentions = [one.block for spec in specs for one in spec.branches if isinstance(one.block, AttentionSpec)]
    ropes = [config.rope(attentions[0].head_dim)] if attentions else []
    return read_decoder(config, specs, norm, *ropes)


def _by_heads(config: ConfigReader, norm: NormSpec, layers: int) -> list[LayerSpec]:
    """Return the layers of DeciLM 6B or 7B. The field `num_key_value_heads_per_layer` lists their numbers of k/v heads.

    `layers` is the number of layers. `norm` is the spec of all norms in them.
    """
    field = "num_key_value_heads_per_layer"
    heads = config.fields.get(field)
    if not isinstance(heads, list) or len(heads) != layers:
        raise config.error(field, f"a list of {layers} numbers, or block_configs")
    mlp = read_gated(config, bias=config.flag("mlp_bias", False))
    readers = [config.within({**config.fields, "num_key_value_heads": one}) for one in heads]
    return [pre_norm_layer(read_attention(one, **read_biases(config)), mlp, norm) for one in readers]


def _blocks(config: ConfigReader, norm: NormSpec, layers: int) -> list[LayerSpec]:
    """Return the layers of a Nemotron-NAS model. The field `block_configs` describes each one.

    `layers` is the number of layers. `norm` is the spec of all norms in them.
    """
    blocks = config.fields.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers or not all(isinstance(one, dict) for one in blocks):
        raise ConfigError(
            "field 'block_configs' is no list of a block for each layer",
            where=config.source,
            expected=f"{layers} objects, each with attention and ffn",
        )
    return [
        _layer(config, block, f"{config.source}, block_configs[{index}]", norm) for index, block in enumerate(blocks)
    ]


def _layer(config: ConfigReader, block: dict[str, Any], where: str, norm: NormSpec) -> LayerSpec:
    config.within(block, where).require("parallel_blocks", (None,), None)
    parts: list[tuple[str, BlockSpec | None, str]] = [
        ("attention", _attention(config, _part(config, block, "attention", where)), "input_layernorm"),
        ("mlp", _feed_forward(config, _part(config, block, "ffn", where)), "post_attention_layernorm"),
    ]
    return LayerSpec(tuple(BranchSpec(name, part, norm.named(at)) for name, part, at in parts if part is not None))


def _part(config: ConfigReader, block: dict[str, Any], name: str, where: str) -> ConfigReader:
    part = block.get(name)
    if not isinstance(part, dict):
        raise config.within(block, where).error(name, "an object")
    return config.within(part, f"{where}.{name}")


def _attention(config: ConfigReader, part: ConfigReader) -> BlockSpec | None:
    for field in ("num_sink_tokens", "mamba", "llama4"):
        part.require(field, (None,), None)
    if part.flag("no_op", False):
        return None
    if part.flag("replace_with_linear", False):
        return LinearPartSpec("self_attn.linear_attn")
    heads, group = config.integer("num_attention_heads"), part.integer("n_heads_in_group")
    if heads % group:
        raise part.error("n_heads_in_group", f"a divisor of {heads}, the heads")
    reader = config.within({**config.fields, "num_key_value_heads": heads // group})
    return read_attention(reader, window=part.integer_or_none("window_length"), **read_biases(config))


def _feed_forward(config: ConfigReader, part: ConfigReader) -> BlockSpec | None:
    part.require("moe", (None,), None)
    part.require("gated", (True,), True)
    if part.flag("no_op", False):
        return None
    if part.flag("replace_with_linear", False):
        return LinearPartSpec("mlp.linear_mlp")
    reader = part if part.fields.get("hidden_act") is not None else config
    return GatedSpec(
        _width(config, part), reader.choice("hidden_act", SILU, "silu"), bias=config.flag("mlp_bias", False)
    )


def _width(config: ConfigReader, part: ConfigReader) -> int:
    """Return the width of a layer's feed-forward part.

    Without the field `ffn_mult`, it is `intermediate_size`. With it, it is `ffn_mult` * 2/3 * hidden size, rounded up
    to a multiple of 256. `part` reads the fields of the feed-forward part, and `config` the fields of the model.
    """
    if part.fields.get("ffn_mult") is None:
        return part.integer("intermediate_size")
    # Six digits, as in the config class (block_config.py).
    size = int(2 * round(part.number("ffn_mult"), 6) * config.integer("hidden_size") / 3)
    if not 0 < size <= MAX_SIZE:
        raise part.error("ffn_mult", f"a value with a width from 1 to {MAX_SIZE}; this one has {size}")
    return -(-size // _WIDTH_STEP) * _WIDTH_STEP
