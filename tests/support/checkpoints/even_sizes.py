"""A tiny checkpoint of every architecture in sizes that divide: among two ranks, and each rank's part into groups."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiny import first_of
from tiny_checkpoint import Tiny

from ingot.ir.errors import ConfigError
from ingot.models.architectures import ARCHITECTURES, read_spec

HEADS, HEAD_DIM, WIDTH, VOCAB = 4, 16, 128, 152
# Whatever a family calls them; a configuration keeps the names that it has.
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), HEADS * HEAD_DIM),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim", "ffn_hidden_size"), WIDTH),
    **dict.fromkeys(("head_dim", "kv_channels"), HEAD_DIM),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), HEADS * HEAD_DIM),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "share_q_dim"), HEADS * HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), WIDTH),
    "share_expert_dim": WIDTH,
    "vocab_size_per_layer_input": VOCAB,
    "vocab_size": VOCAB,
}
_KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "kv_n_heads")


def even(tiny: Tiny) -> Tiny:
    """The checkpoint in sizes that divide, with its flags and constants; as it is where its reader refuses these."""
    config = _even_config(tiny.config)
    try:
        read_spec(config)
    except ConfigError:
        return tiny
    return replace(tiny, name=f"{tiny.name}-even", config=config)


def _even_config(given: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(given)
    for part in ("text_config", "attn_config", "ffn_config"):
        if isinstance(inner := config.get(part), dict):
            config[part] = _even_config(inner)
    heads = next((config[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in config), None)
    for name in _SIZES.keys() & config.keys():  # a list has an item for each layer
        if config[name] is None:  # such as no latent of q
            continue
        config[name] = [_SIZES[name]] * len(config[name]) if isinstance(config[name], list) else _SIZES[name]
    for name in _KV_HEADS:
        if name in config:
            config[name] = HEADS if config[name] == heads else 1 if config[name] == 1 else HEADS // 2
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(table := config.get(field), dict):
            config[field] = _fitting(table, config)
    if isinstance(blocks := config.get("block_configs"), list):
        config["block_configs"] = [_even_block(block) for block in blocks]
    return config


def _even_block(block: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model whose layers differ: groups of one or two heads, and the width of all."""
    attention, ffn = dict(block["attention"]), dict(block["ffn"])
    if "n_heads_in_group" in attention:
        attention["n_heads_in_group"] = min(attention["n_heads_in_group"], 2)
    if "intermediate_size" in ffn:
        ffn["intermediate_size"] = WIDTH
    return {**block, "attention": attention, "ffn": ffn}


def _fitting(table: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A table of rope whose lists have an item for each pair of rotated elements."""
    part = table.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    pairs = int(HEAD_DIM * part) // 2
    lists = {name: (value * pairs)[:pairs] for name, value in table.items() if isinstance(value, list)}
    return {**table, **lists}


EVEN: Mapping[str, Tiny] = {architecture: even(first_of(architecture)) for architecture in ARCHITECTURES}
