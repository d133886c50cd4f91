"""Read the configs of StableLM: Llama with layer norms, and heads that are rotated in part.

Some models have attention and MLP in parallel, and a norm for each head of q and k.
"""

from dataclasses import replace

from ingot.models.blocks.attention import QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    GELU,
    SILU,
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_norm,
    require_square_heads,
)


def stablelm(config: ConfigReader) -> DecoderSpec:
    # Transformers' defaults, configuration_stablelm.py.
    config = config.within({"num_key_value_heads": 32, "partial_rotary_factor": 0.25, **config.fields})
    head_dim, norm = require_square_heads(config), read_norm(config, 1e-5, "layer_norm_eps", kind="layer", bias=True)
    of_head = replace(norm, bias=False, wide=True, apart=True)  # torch's layer norms, which round once
    qk_norm = QKNormSpec(of_head.named("q_layernorm.norms"), of_head.named("k_layernorm.norms"), "each head")
    attention = read_attention(
        config,
        bias=config.flag("use_qkv_bias", False),
        qk_norm=qk_norm if config.flag("qk_layernorm", False) else None,
    )
    mlp = read_gated(config, activations={**SILU, **GELU})
    layer = pre_norm_layer(attention, mlp, norm)
    if config.flag("use_parallel_residual", False):
        branches = (BranchSpec("attention", attention, norm.named("input_layernorm")), BranchSpec("mlp", mlp))
        layer = LayerSpec(branches, parallel=True)
    return read_decoder(config, [layer] * count_layers(config), norm, config.rope(head_dim))


def stablelm_epoch(config: ConfigReader) -> DecoderSpec:
    """Return the spec that an early config.json of StableLM describes.

    Its field names are those of modeling_stablelm_epoch.py.
    """
    config.require("rotary_scaling_factor", (1.0,), 1.0)
    names = {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"}
    named = {new: config.number(old) for old, new in names.items() if config.fields.get(old) is not None}
    return stablelm(config.within({**config.fields, **named}))
