"""Read the config of PhiMoE: Mixtral with layer norms, and two experts for each token by SparseMixer."""

from collections.abc import Mapping
from typing import Any

from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec
from ingot.models.config import ConfigReader, RopeSpec
from ingot.models.families.mixtral import NAMES
from ingot.models.families.reading import (
    SILU,
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_head,
    read_norm,
)
from ingot.models.families.reading_experts import read_counts


def phimoe(config: ConfigReader) -> DecoderSpec:
    experts, top_k = read_counts(config, "num_local_experts")
    if top_k != 2:
        raise config.error("num_experts_per_tok", "2: SparseMixer chooses two experts")
    mlp = ExpertsSpec(
        experts,
        config.integer("intermediate_size"),
        RouterSpec(top_k, jitter=config.number("router_jitter_noise", 0.01)),
        config.choice("hidden_act", SILU, "silu"),
        place="block_sparse_moe",
        names=NAMES,
    )
    window, norm = config.integer_or_none("sliding_window"), read_norm(config, 1e-5, kind="layer", bias=True)
    attention = read_attention(config, window=window, **read_biases(config))
    layer, head = pre_norm_layer(attention, mlp, norm), read_head(config, bias=config.flag("lm_head_bias", False))
    return read_decoder(config, [layer] * count_layers(config), norm, _rope(config, attention.head_dim), head=head)


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Return the rotary embedding. A scaled one has its factor on cosines and sines in the table.

    The factor is one number for short contexts and one for long ones. Ingot supports equal numbers only, as in
    published models.
    """
    field = "rope_scaling" if config.fields.get("rope_parameters") is None else "rope_parameters"
    found = config.fields.get(field)
    table: Mapping[str, Any] = found if isinstance(found, dict) else {}
    if table.get("rope_type", table.get("type", "default")) == "default":
        return config.rope(head_dim, theta=1e6)
    scales = config.within(table, f"{config.source}, {field}")
    scale = scales.number("short_mscale")
    scales.require("long_mscale", (scale,), None)
    original = scales.fields.get(
        "original_max_position_embeddings", config.fields.get("original_max_position_embeddings")
    )
    made = {**table, "attention_factor": scale, "original_max_position_embeddings": original}
    return config.within({**config.fields, field: made}).rope(head_dim, theta=1e6)
