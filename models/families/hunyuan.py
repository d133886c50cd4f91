"""Read the configs of HunYuan: Llama with norms of q and k after the rotary embedding, dense or with experts."""

from collections.abc import Sequence
from dataclasses import replace

from ingot.models.blocks.attention import QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec, SharedSpec
from ingot.models.blocks.feed_forward import GatedNames
from ingot.models.blocks.layer import BlockSpec
from ingot.models.config import MAX_NUMBER, ConfigReader, RopeSpec
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_norm,
)
from ingot.models.families.reading_experts import MOST_EXPERTS


def hunyuan_v1_dense(config: ConfigReader) -> DecoderSpec:
    return _hunyuan(config, [read_gated(config)] * count_layers(config))


def hunyuan_v1_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of HunYuan with experts describes.

    Numbers may be lists with one number for each layer. Each layer also has one part for all tokens.
    """
    layers, dense = count_layers(config), read_gated(config)
    _require_each(config, "num_shared_expert", 1, layers)
    _require_each(config, "moe_intermediate_size", dense.width, layers)
    config.require("use_mixed_mlp_moe", (True,), True)
    experts, chosen = _each(config, "num_experts", layers), _each(config, "moe_topk", layers)
    shared = SharedSpec(replace(dense, names=GatedNames("shared_mlp")))
    parts = []
    for count, top_k in zip(experts, chosen, strict=True):
        if top_k > count:
            raise config.error("moe_topk", f"at most {count}, the number of experts in 'num_experts'")
        router = RouterSpec(top_k, renormalize=True, wide=True, stored="gate.wg")
        parts.append(ExpertsSpec(count, dense.width, router, dense.activation, shared=shared))
    return _hunyuan(config, parts)


def _each(config: ConfigReader, field: str, layers: int) -> list[int]:
    """Return the positive numbers of a field, one for each layer. The field may have one number for all."""
    value = config.fields.get(field)
    if isinstance(value, list):
        if len(value) != layers:
            raise config.error(field, f"a whole number, or a list of {layers}")
        return [config.within({field: one}).integer(field, most=MOST_EXPERTS) for one in value]
    return [config.integer(field, most=MOST_EXPERTS)] * layers


def _require_each(config: ConfigReader, field: str, allowed: int, layers: int) -> None:
    """Raise ConfigError unless a field is missing, or has the value `allowed`, once or for each layer."""
    config.require(field, (allowed, [allowed] * layers), allowed)


def _hunyuan(config: ConfigReader, parts: Sequence[BlockSpec]) -> DecoderSpec:
    """Return the spec of a HunYuan decoder with these feed-forward parts, one for each layer."""
    config.require("use_qk_norm", (True,), True)
    config.require("use_cla", (False,), False)  # sharing of keys and values by layers
    config.require("mlp_bias", (False,), False)
    norm = read_norm(config, 1e-5)
    qk_norm = QKNormSpec(norm.named("query_layernorm"), norm.named("key_layernorm"), after_rotation=True)
    attention = read_attention(config, qk_norm=qk_norm, **read_biases(config))
    layers = [pre_norm_layer(attention, part, norm) for part in parts]
    return read_decoder(config, layers, norm, _rope(config, attention.head_dim))


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Return the rotary embedding, which rotates whole heads.

    With type "dynamic" and the field `alpha`, the base is multiplied by a power of `alpha`. This base holds for
    sequences of any length.
    """
    field = "rope_scaling" if config.fields.get("rope_parameters") is None else "rope_parameters"
    table = config.fields.get(field)
    table = table if isinstance(table, dict) else {}
    fields = config.within({**config.fields, **table}, f"{config.source}, {field}")
    fields.require("partial_rotary_factor", (1.0,), 1.0)
    if table.get("rope_type", table.get("type")) != "dynamic" or not fields.fields.get("alpha"):
        return config.rope(head_dim)
    if head_dim < 4:
        raise fields.error("alpha", "no alpha, or heads of at least 4 elements")
    # Transformers, modeling_hunyuan_v1_dense.py: NTK-aware scaling with a fixed alpha.
    base = fields.number("rope_theta", 10000.0) * fields.number("alpha") ** (head_dim / (head_dim - 2))
    if base > MAX_NUMBER:
        raise fields.error("alpha", f"a value with a base of at most {MAX_NUMBER}")
    return RopeSpec("default", base, head_dim)
