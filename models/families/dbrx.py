"""Read the config of DBRX: layer norms without biases, clipped q, k and v, and experts that are rows of one matrix."""

from typing import Any

from ingot.ir.errors import ConfigError
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.expert_names import ExpertNames
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.families.reading import SILU
from ingot.models.families.reading_experts import read_counts

_NAMES = ExpertNames("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2", as_rows=True)


def dbrx(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of DBRX describes. Two objects have the fields of attention and of experts."""
    config.require("tie_word_embeddings", (False,), False)
    hidden, heads = config.integer("d_model", 2048), config.integer("n_heads", 16)
    if hidden % heads or hidden // heads % 2:
        raise ConfigError(
            f"d_model {hidden} over n_heads {heads}", where=config.source, expected="an even number, for rope"
        )
    own = _within(config, "attn_config")
    kv_heads = own.integer("kv_n_heads", 1)
    if heads % kv_heads:
        raise own.error("kv_n_heads", f"a divisor of {heads}, the number of heads in 'n_heads'")
    config.require("num_key_value_heads", (kv_heads,), kv_heads)  # written by transformers
    attention = AttentionSpec(
        heads,
        kv_heads,
        hidden // heads,
        clip=own.number_or_none("clip_qkv"),
        names=AttentionNames("norm_attn_norm.attn", o="out_proj", merged="Wqkv"),
    )
    norm = NormSpec(1e-5, kind="layer", wide=True)  # no field sets epsilon
    branches = (
        BranchSpec("attention", attention, norm.named("norm_attn_norm.norm_1")),
        BranchSpec("mlp", _experts(_within(config, "ffn_config"), hidden), norm.named("norm_attn_norm.norm_2")),
    )
    layers = config.integer("n_layers", 24, most=MAX_LAYERS)
    theta = own.number_or_none("rope_theta")
    # Published models have the base in `attn_config`. Transformers 5 adds `rope_parameters` with its default base.
    rope = config.rope(hidden // heads) if theta is None else own.within({"rope_theta": theta}).rope(hidden // heads)
    return DecoderSpec(
        vocab=config.integer("vocab_size", 32000),
        hidden=hidden,
        layers=(LayerSpec(branches),) * layers,
        norm=norm.named("norm_f"),
        ropes=(rope,),
        embedding=EmbeddingSpec(stored="wte"),
        names=DecoderNames("transformer", "blocks"),
    )


def _within(config: ConfigReader, field: str) -> ConfigReader:
    """Return a reader of the object in a field. A missing object is empty."""
    value: Any = config.fields.get(field)
    if not isinstance(value, dict | None):
        raise config.error(field, "an object")
    return config.within(value or {}, f"{config.source}, {field}")


def _experts(config: ConfigReader, hidden: int) -> ExpertsSpec:
    config.require("hidden_size", (hidden,), hidden)
    act = _within(config, "ffn_act_fn")
    experts, top_k = read_counts(config, "moe_num_experts", "moe_top_k")
    config.require("moe_normalize_expert_weights", (1, None), None)
    # Without the field it is 1; null means that weights are not divided.
    renormalize = config.fields.get("moe_normalize_expert_weights", 1) is not None
    return ExpertsSpec(
        experts,
        config.integer("ffn_hidden_size", 3584),
        RouterSpec(top_k, renormalize=renormalize, stored="router.layer"),
        act.choice("name", SILU, "silu"),
        place="ffn",
        names=_NAMES,
    )
