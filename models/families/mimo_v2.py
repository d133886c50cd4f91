"""Read the config of MiMo-V2-Flash: windows with sinks, values narrower than keys, and experts with sigmoid scores."""

from collections.abc import Sequence
from dataclasses import replace

from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import ConfigReader, RopeSpec
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_norm,
)
from ingot.models.families.reading_experts import read_sigmoid_experts

# The values of missing fields, by transformers' class MiMoV2FlashConfig.
_MISSING = {
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.334,
}
_VALUE_SCALE = 0.707
_WINDOW = 129
_PERIOD = 6  # of layers without a window
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BASES = {_FULL: 5e6, _SLIDING: 1e4}
_NAMES = DecoderNames(unread=(*DecoderNames.unread, r"model\.mtp\..*"))


def mimo_v2_flash(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of MiMo-V2-Flash describes.

    Layers with a window have twice as many heads of k and v, sinks, and a rotary table of their own. Published configs
    name the kinds of layers in `hybrid_layer_pattern` and `moe_layer_freq`, transformers in `layer_types` and
    `mlp_layer_types`. Layers for multi-token prediction are in the checkpoint, and Ingot does not use them.
    """
    scale = config.fields.get("attention_value_scale", _VALUE_SCALE)  # null: no factor
    given = {name: value for name, value in config.fields.items() if value is not None}
    config = config.within({**_MISSING, **given, "attention_value_scale": scale})
    layers, norm = count_layers(config), _read_norm(config)
    types = _read_kinds(config, ("layer_types", "hybrid_layer_pattern"), (_FULL, _SLIDING), layers)
    if types is None:
        types = [_FULL if index == 0 or (index + 1) % _PERIOD == 0 else _SLIDING for index in range(layers)]
    parts = _read_kinds(config, ("mlp_layer_types", "moe_layer_freq"), ("dense", "sparse"), layers)
    parts = parts or ["dense", *["sparse"] * (layers - 1)]
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    config.require("n_shared_experts", (0,), 0)
    dense = read_gated(config)
    sparse = read_sigmoid_experts(config, "n_routed_experts", 0, dense.activation)
    attentions = _read_attentions(config)
    decoder = [
        pre_norm_layer(attentions[kind], dense if part == "dense" else sparse, norm)
        for kind, part in zip(types, parts, strict=True)
    ]
    return read_decoder(config, decoder, norm, *_read_ropes(config), names=_NAMES)


def _read_norm(config: ConfigReader) -> NormSpec:
    """Return the spec of norms. Published configs call the epsilon `layernorm_epsilon`."""
    published = config.number("layernorm_epsilon", 1e-5)
    norm = read_norm(config, published)
    if "layernorm_epsilon" in config.fields and norm.eps != published:
        raise config.error("layernorm_epsilon", f"{norm.eps:g}, as in 'rms_norm_eps'")
    return norm


def _read_kinds(
    config: ConfigReader, fields: tuple[str, str], kinds: tuple[str, str], layers: int
) -> Sequence[str] | None:
    """Return the kind of each layer, one of `kinds`; None if both fields are missing.

    fields   the field that lists the kinds by name, and the field that lists their indices in `kinds`
    """
    named, numbered = config.listed(fields[0], layers, kinds), config.listed(fields[1], layers, (0, 1))
    if numbered is None:
        return named
    found = tuple(kinds[index] for index in numbered)
    if named is not None and named != found:
        raise config.error(fields[1], f"the layers of '{fields[0]}'")
    return found


def _read_attentions(config: ConfigReader) -> dict[str, AttentionSpec]:
    """Return the attention of layers without a window and with one. Raises ConfigError if their heads do not fit."""
    full = read_attention(
        config,
        bias=config.flag("attention_bias", False),
        v_width=config.integer("v_head_dim"),
        v_scale=config.number_or_none("attention_value_scale"),
        names=AttentionNames(sinks="attention_sink_bias"),
    )
    kv_heads = 2 * full.kv_heads
    if full.heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of {full.heads} heads, also when doubled for windows")
    for field, value in (
        ("swa_num_attention_heads", full.heads),
        ("swa_num_key_value_heads", kv_heads),
        ("swa_head_dim", full.head_dim),
        ("swa_v_head_dim", full.value_width),
        ("add_full_attention_sink_bias", False),
        ("add_swa_attention_sink_bias", True),
    ):
        config.require(field, (value,), value)
    window = _read_window(config)
    sliding = replace(full, kv_heads=kv_heads, window=window, sinks=True, rotary=RotarySpec(table=1))
    return {_FULL: full, _SLIDING: sliding}


def _read_window(config: ConfigReader) -> int:
    """Return the number of positions that a token sees in a window, its own included.

    The field `sliding_window_size` of published configs does not count the own position, as in transformers. If both
    are given, `sliding_window` has either number.
    """
    size = config.integer_or_none("sliding_window_size")
    if size is None:
        window = config.integer("sliding_window", _WINDOW)
    else:
        window = size + 1
        config.require("sliding_window", (size, window), window)
    config.require("attention_chunk_size", (window - 1, window), window)  # published with it; nothing reads it
    return window


def _read_ropes(config: ConfigReader) -> list[RopeSpec]:
    """Return the rotary embeddings of layers without a window and with one.

    Published configs have the bases `rope_theta` and `swa_rope_theta`, transformers a table for each kind of layer.
    """
    head_dim, field = config.integer("head_dim"), "rope_parameters"
    tables = config.fields.get(field)
    if tables is None:
        field = "rope_scaling"
        local = config.within({**config.fields, "rope_theta": config.number("swa_rope_theta", _BASES[_SLIDING])})
        ropes = [config.rope(head_dim, theta=_BASES[_FULL]), local.rope(head_dim)]
    elif not isinstance(tables, dict) or tables.keys() != _BASES.keys():
        raise config.error(field, f"an object with one table for each of {' and '.join(_BASES)}")
    else:
        ropes = [config.rope(head_dim, layer_type=kind, theta=base) for kind, base in _BASES.items()]
    if any(rope.rope_type != "default" for rope in ropes):
        raise config.error(field, "rotary embeddings of the type default")
    return ropes
