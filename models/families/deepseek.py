"""Read the configs of DeepSeek-V2, V3 and V3.2: latent attention, and experts after some dense layers.

GLM-4.7-Flash is a DeepSeek-V3 whose layers with experts are listed. Kimi-K2 is one by name too. Mistral 4 has softmax
scores, and queries that grow with the position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.expert_names import ExpertNames
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec, SharedSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec
from ingot.models.blocks.indexer import IndexerSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import PositionScaleSpec, RotarySpec
from ingot.models.config import ConfigReader, RopeSpec
from ingot.models.families.reading import count_layers, pre_norm_layer, read_decoder, read_gated, read_norm
from ingot.models.families.reading_experts import read_counts, read_groups, read_sigmoid_experts

# The norms of latents have this epsilon in all models (transformers, DeepseekV2RMSNorm and DeepseekV3RMSNorm), whatever
# the field `rms_norm_eps` is.
_LATENT_EPS = 1e-6
# The values of missing fields, by transformers' classes DeepseekV2Config and DeepseekV3Config.
_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V2 = {
    **_SIZES,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 1407,
    "num_nextn_predict_layers": 0,
}
_V3 = {
    **_SIZES,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
}
# By transformers' class DeepseekV32Config.
_V32 = {**_V3, "q_lora_rank": 1536, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
# By transformers' class Glm4MoeLiteConfig.
_GLM = {
    **_SIZES,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "q_lora_rank": 768,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1,
}
# By transformers' class Mistral4Config.
_MISTRAL = {
    **_SIZES,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "first_k_dense_replace": 0,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 4,
}
_MISTRAL_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_V2_CHOICES = {"greedy": "greedy", "group_limited_greedy": "group_limited_greedy"}


def deepseek_v2(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of DeepSeek-V2 describes.

    Experts are chosen by softmax scores. With `topk_method` "group_limited_greedy", a group's score is its best one.
    """
    config = _filled(config, _V2)
    bias = config.flag("mlp_bias", False)
    dense = read_gated(config, bias=bias)
    config.require("scoring_func", ("softmax",), "softmax")
    config.require("norm_topk_prob", (False,), False)  # transformers ignores it, DeepSeek's own code does not
    experts, top_k = read_counts(config, "n_routed_experts")
    by_groups = config.choice("topk_method", _V2_CHOICES, "greedy") == "group_limited_greedy"
    groups: dict[str, Any] = read_groups(config, experts, top_k, best=1) if by_groups else {}
    router = RouterSpec(top_k, scale=config.number("routed_scaling_factor"), wide=True, **groups)
    width = config.integer("moe_intermediate_size")
    part = GatedSpec(
        config.integer("n_shared_experts") * width, dense.activation, bias=bias, names=GatedNames("shared_experts")
    )
    sparse = ExpertsSpec(experts, width, router, dense.activation, shared=SharedSpec(part))
    return _deepseek(config, dense, sparse, RotarySpec(interleaved=True), read_norm(config))


def deepseek_v3(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of DeepSeek-V3 describes.

    Experts are chosen by sigmoid scores, with a bias for the choice alone and by groups. Layers for multi-token
    prediction follow the last layer, and Ingot does not use them.
    """
    return _third(_filled(config, _V3), read_norm(config))


def deepseek_v32(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of DeepSeek-V3.2 describes: DeepSeek-V3's, in which an indexer chooses.

    Each layer has an indexer for the positions that its attention reads (DeepSeek sparse attention). The latent of q is
    never missing. The list `mlp_layer_types` may name the layers with experts.
    """
    layers = count_layers(config)
    types = config.listed("mlp_layer_types", layers, ("dense", "sparse"))
    config = _filled(config, _V32)
    config.require("rope_interleave", (True,), True)
    config.require("mlp_bias", (False,), False)
    kinds = ["indexed_attention"] * layers
    config.require("layer_types", (kinds,), kinds)
    width, rotated = config.integer("index_head_dim"), config.integer("qk_rope_head_dim")
    if width < rotated:
        raise config.error("index_head_dim", f"at least {rotated}, the elements that 'qk_rope_head_dim' rotates")
    indexer = IndexerSpec(config.integer("index_n_heads"), width, config.integer("index_topk"))
    return _third(config, read_norm(config), types or None, indexer)


def glm4_moe_lite(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of GLM-4.7-Flash describes: DeepSeek-V3's, in which layers may be listed.

    The list `mlp_layer_types` names the layers with experts. Without it, they are all layers but the first. Published
    configs also have the field `first_k_dense_replace`, which may not say something else.
    """
    layers = count_layers(config)
    types = config.listed("mlp_layer_types", layers, ("dense", "sparse"))
    types = types or ("dense", *["sparse"] * (layers - 1))
    dense = (*types, "sparse").index("sparse")
    config.require("first_k_dense_replace", (dense,), dense)
    without = {"q_lora_rank"} & config.fields.keys()  # null: q has no latent
    missing = {name: value for name, value in _GLM.items() if name not in without}
    return _third(_filled(config, missing), read_norm(config, 1e-5), types)


def mistral4(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Mistral 4 describes.

    Experts are chosen by softmax scores and by groups, and are stored in stacks. The table of the rotary embedding has
    the strength of the factor on queries, and its period: the context before scaling.
    """
    without = {"q_lora_rank"} & config.fields.keys()  # null: q has no latent
    config = _filled(config, {name: value for name, value in _MISTRAL.items() if name not in without})
    config, q_scale = _mistral_rope(config)
    dense = read_gated(config)
    experts, top_k = read_counts(config, "n_routed_experts")
    router = RouterSpec(
        top_k,
        renormalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor"),
        **read_groups(config, experts, top_k),
    )
    width = config.integer("moe_intermediate_size")
    part = GatedSpec(config.integer("n_shared_experts") * width, dense.activation, names=GatedNames("shared_experts"))
    names = ExpertNames(gate_up="experts.gate_up_proj", down="experts.down_proj")
    sparse = ExpertsSpec(experts, width, router, dense.activation, shared=SharedSpec(part), names=names)
    rotary = RotarySpec(interleaved=config.flag("rope_interleave", True))
    return _deepseek(config, dense, sparse, rotary, read_norm(config), q_scale=q_scale)


def _mistral_rope(config: ConfigReader) -> tuple[ConfigReader, PositionScaleSpec]:
    """Return a reader in which the rotary embedding is as in DeepSeek's configs, and the factor on queries.

    Mistral 4 states the sizes of whole heads: `head_dim` is the number of elements of q, of which
    `partial_rotary_factor` are rotated.
    """
    field = "rope_scaling" if config.fields.get("rope_parameters") is None else "rope_parameters"
    found = config.fields.get(field)
    table = dict(_MISTRAL_ROPE) if found is None else found
    if not isinstance(table, dict):
        raise config.error(field, "an object with one rope_type and its numbers")
    inner, rotated = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    config.require("head_dim", (inner + rotated,), inner + rotated)
    of_table = config.within(table, f"{config.source}, {field}")
    share = rotated / (inner + rotated)
    if not math.isclose(of_table.number("partial_rotary_factor", share), share, rel_tol=1e-3):
        raise of_table.error("partial_rotary_factor", f"{share:g}, as 'qk_rope_head_dim' has it")
    period = of_table.integer("original_max_position_embeddings")
    q_scale = PositionScaleSpec(period, of_table.number("llama_4_scaling_beta"))
    table = {name: value for name, value in table.items() if name != "partial_rotary_factor"}
    return config.within({**config.fields, field: table, "head_dim": rotated}), q_scale


def _third(
    config: ConfigReader, norm: NormSpec, types: Sequence[str] | None = None, indexer: IndexerSpec | None = None
) -> DecoderSpec:
    """Return the spec of a decoder as DeepSeek-V3. `types` are "dense" or "sparse" by layer, if they are listed."""
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    dense = read_gated(config)
    sparse = read_sigmoid_experts(config, "n_routed_experts", config.integer("n_shared_experts"), dense.activation)
    rotary = RotarySpec(interleaved=config.flag("rope_interleave", True))
    return _deepseek(config, dense, sparse, rotary, norm, types, indexer=indexer)


def _filled(config: ConfigReader, missing: Mapping[str, Any]) -> ConfigReader:
    """Return a reader in which fields that are missing or null have the values `missing`."""
    filled = {name: value for name, value in missing.items() if config.fields.get(name) is None}
    return config.within({**config.fields, **filled})


def _deepseek(
    config: ConfigReader,
    dense: GatedSpec,
    sparse: ExpertsSpec,
    rotary: RotarySpec,
    norm: NormSpec,
    types: Sequence[str] | None = None,
    q_scale: PositionScaleSpec | None = None,
    indexer: IndexerSpec | None = None,
) -> DecoderSpec:
    """Return the spec of a decoder. Its layers have the part `dense` or `sparse`, as `types` lists them.

    Without `types`, the first layers have the part `dense`.
    """
    config.require("moe_layer_freq", (1,), 1)
    layers = count_layers(config)
    if types is None:
        first = config.count("first_k_dense_replace", 0)
        types = ["dense" if index < first else "sparse" for index in range(layers)]
    rope = config.rope(config.integer("qk_rope_head_dim"))
    attention = replace(read_latent_attention(config, rope, rotary), q_scale=q_scale, indexer=indexer)
    decoder = [pre_norm_layer(attention, dense if kind == "dense" else sparse, norm) for kind in types]
    names = DecoderNames(unread=(*DecoderNames.unread, *_predicting(config, layers)))
    return read_decoder(config, decoder, norm, rope, names=names)


def _predicting(config: ConfigReader, layers: int) -> list[str]:
    """Return a regular expression for the tensors of each layer that predicts further tokens.

    These layers are numbered after the last of the `layers` layers.
    """
    more = config.count("num_nextn_predict_layers", 0)
    return [rf"model\.layers\.{index}\..*" for index in range(layers, layers + more)]


def read_latent_attention(config: ConfigReader, rope: RopeSpec, rotary: RotarySpec) -> LatentAttentionSpec:
    """Return the spec of a latent attention, with its sizes and the factor on scores from the config."""
    heads, inner = config.integer("num_attention_heads"), config.integer("qk_nope_head_dim")
    rotated = config.integer("qk_rope_head_dim")
    config.require("num_key_value_heads", (heads,), heads)
    config.require("head_dim", (rotated,), rotated)
    config.require("qk_head_dim", (inner + rotated,), inner + rotated)
    config.require("partial_rotary_factor", (1.0,), 1.0)
    # Missing, it is 1536 as in transformers. Null means that q has no latent.
    without = "q_lora_rank" in config.fields and config.fields["q_lora_rank"] is None
    q_rank = None if without else config.integer("q_lora_rank", 1536)
    norm, bias = NormSpec(_LATENT_EPS), config.flag("attention_bias", False)
    return LatentAttentionSpec(
        heads=heads,
        inner=inner,
        rotated=rotated,
        value_width=config.integer("v_head_dim"),
        rank=config.integer("kv_lora_rank"),
        kv_norm=norm.named("kv_a_layernorm"),
        scale=(inner + rotated) ** -0.5 * _temperature(config, rope) ** 2,
        q_rank=q_rank,
        q_norm=None if q_rank is None else norm.named("q_a_layernorm"),
        bias=bias,
        o_bias=bias,
        rotary=rotary,
    )


def _temperature(config: ConfigReader, rope: RopeSpec) -> float:
    """Return YaRN's factor on q and on k, from the field `mscale_all_dim` of the rope's table.

    It is 0.1 * mscale_all_dim * ln(factor) + 1 for a factor above 1, and otherwise 1 (DeepSeek's modeling_deepseek.py).
    """
    field = "rope_scaling" if config.fields.get("rope_parameters") is None else "rope_parameters"
    table = config.fields.get(field)
    table = table if isinstance(table, dict) else {}
    if rope.rope_type == "default" or not table.get("mscale_all_dim"):
        return 1.0
    if "factor" not in dict(rope.constants):
        raise config.error(field, f"no 'mscale_all_dim' with the type {rope.rope_type}, which has no factor")
    scale, factor = config.within(table, f"{config.source}, {field}").number("mscale_all_dim"), rope.number("factor")
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
