"""Read the config of the dense HunYuan models: Llama with norms of q and k after the rotary embedding."""

from ingot.models.blocks.attention import QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
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


def hunyuan_v1_dense(config: ConfigReader) -> DecoderSpec:
    config.require("use_qk_norm", (True,), True)
    config.require("use_cla", (False,), False)  # sharing of keys and values by layers
    config.require("mlp_bias", (False,), False)
    norm = read_norm(config, 1e-5)
    qk_norm = QKNormSpec(norm.named("query_layernorm"), norm.named("key_layernorm"), after_rotation=True)
    attention = read_attention(config, qk_norm=qk_norm, **read_biases(config))
    layer = pre_norm_layer(attention, read_gated(config), norm)
    return read_decoder(config, [layer] * count_layers(config), norm, _rope(config, attention.head_dim))


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
