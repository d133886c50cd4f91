"""Read the config of LongCat-Flash: two latent attentions and dense parts in a layer, with experts next to them."""

from dataclasses import replace
from typing import Any

from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec
from ingot.models.blocks.layer import BlockSpec, BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.blocks.shortcut import ShortcutEndSpec, ShortcutStartSpec
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.families.deepseek import read_latent_attention
from ingot.models.families.reading import SILU, read_decoder, read_norm
from ingot.models.families.reading_experts import MOST_EXPERTS, read_counts

# The values of missing fields, by transformers' class LongcatFlashConfig.
_MISSING: dict[str, Any] = {
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048,
    "n_routed_experts": 512,
    "moe_topk": 12,
    "zero_expert_num": 256,
    "routed_scaling_factor": 6.0,
}
_BASE = 1e7


def longcat_flash(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of LongCat-Flash describes. Its `num_layers` counts pairs of layers here.

    The experts of a pair read the input of the first dense part, and their result is added with the second one's. Some
    experts return their input. Layers for multi-token prediction are in the checkpoint, and Ingot does not use them.
    """
    given = {name: value for name, value in config.fields.items() if value is not None}
    config = config.within({**_MISSING, **given})
    pairs, norm = config.integer("num_layers", most=MAX_LAYERS // 2), read_norm(config, 1e-5)
    config.require("num_hidden_layers", (2 * pairs,), 2 * pairs)
    for field, value in (
        ("attention_method", "MLA"),
        ("mla_scale_q_lora", True),
        ("mla_scale_kv_lora", True),
        ("zero_expert_type", "identity"),
        ("router_bias", False),
        ("norm_topk_prob", False),
    ):
        config.require(field, (value,), value)
    rope = config.rope(config.integer("qk_rope_head_dim"), theta=_BASE)
    attention, hidden = read_latent_attention(config, rope, RotarySpec(interleaved=True)), config.integer("hidden_size")
    assert attention.q_rank is not None, "the latent of q has a size, which is never null here"
    # Both parts of q have one factor, so scores have it.
    attention = replace(
        attention,
        scale=attention.scale * (hidden / attention.q_rank) ** 0.5,
        kv_factor=(hidden / attention.rank) ** 0.5,
    )
    dense = GatedSpec(config.integer("ffn_hidden_size"), config.choice("hidden_act", SILU, "silu"))
    experts = _read_experts(config, dense.activation)
    layers = []
    for index in range(2 * pairs):
        mlp = replace(dense, names=GatedNames(f"mlps.{index % 2}"))
        part: BlockSpec = ShortcutEndSpec(mlp, index - 1) if index % 2 else ShortcutStartSpec(mlp, experts)
        own = replace(attention, names=replace(attention.names, place=f"self_attn.{index % 2}"))
        layers.append(_layer(own, part, norm, index % 2))
    # Transformers also writes matrices of experts that return their input.
    numbers = "|".join(str(experts.experts + number) for number in range(experts.identities))
    unread = (r"model\.mtp\..*", rf"model\.layers\.\d+\.mlp\.experts\.({numbers})\.(gate|up)_proj\.weight")
    # Each index of the checkpoint's list of layers has two layers.
    names = DecoderNames(together=2, unread=(*DecoderNames.unread, *unread))
    return read_decoder(config, layers, norm, rope, names=names)


def _layer(attention: BlockSpec, mlp: BlockSpec, norm: NormSpec, number: int) -> LayerSpec:
    """Return the layer with this `number`, 0 or 1, of a pair."""
    return LayerSpec(
        (
            BranchSpec("attention", attention, norm.named(f"input_layernorm.{number}")),
            BranchSpec("mlp", mlp, norm.named(f"post_attention_layernorm.{number}")),
        )
    )


def _read_experts(config: ConfigReader, activation: str) -> ExpertsSpec:
    """Return the spec of experts. A token chooses among those with weights and those that return their input."""
    identities = config.count("zero_expert_num", 0, most=MOST_EXPERTS)
    experts, top_k = read_counts(config, "n_routed_experts", "moe_topk", others=identities)
    router = RouterSpec(
        top_k,
        choice_bias="router.e_score_correction_bias",
        scale=config.number("routed_scaling_factor"),
        wide=True,
        stored="router.classifier",
    )
    return ExpertsSpec(experts, config.integer("expert_ffn_hidden_size"), router, activation, identities=identities)
