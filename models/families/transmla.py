"""Read the configs of TransMLA (arXiv 2502.07864): Llama and Qwen 3 whose attention was converted to latent attention.

`LlamaMLAForCausalLM` is the architecture of TransMLA's own code for Llama, Qwen 2 and Mistral. The field
`qk_rope_heads` is Ingot's: TransMLA's checkpoints have one part. `Qwen3MLAForCausalLM` is Ingot's, because norms of q
and k come before the matrices of the latents.
"""

from dataclasses import replace

from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec
from ingot.models.blocks.layer import BlockSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.normed_latent_attention import NormedLatentAttentionSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import ConfigReader
from ingot.models.families.llama import llama
from ingot.models.families.qwen import qwen3

# DeepSeek's norms of latents have it whatever `rms_norm_eps` is, and TransMLA uses its class (mla.py).
_LATENT_EPS = 1e-6


def llama_mla(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of a converted Llama describes.

    The field `attention_bias` is for the linears of q and of the latents. The output linear has no bias.
    """
    heads = config.integer("num_attention_heads")
    inner, value_width = config.integer("qk_nope_head_dim", 128), config.integer("v_head_dim", 128)
    rotated, parts = _rotated(config)
    config.require("num_key_value_heads", (heads,), heads)
    config.require("head_dim", (rotated // parts,), rotated // parts)
    config.require("qk_head_dim", (inner + rotated,), inner + rotated)
    config.require("q_lora_rank", (None,), None)
    bias = config.flag("attention_bias", False)
    norm = NormSpec(_LATENT_EPS, stored="kv_a_layernorm") if config.flag("qk_latent_layernorm", True) else None
    latent = LatentAttentionSpec(
        heads=heads,
        inner=inner,
        rotated=rotated,
        value_width=value_width,
        rank=config.integer("kv_lora_rank", 512),
        kv_norm=norm,
        scale=(inner + rotated) ** -0.5,
        bias=bias,
        q_bias=bias,
        rotary=RotarySpec(interleaved=True),
        rope_heads=parts,
    )
    return _with_attention(config, llama(config), latent, rotated // parts)


def qwen3_mla(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of a converted Qwen 3 describes. Heads and biases are those of Qwen 3."""
    config.require("use_sliding_window", (False,), False)
    rotated, parts = _rotated(config)
    base = qwen3(config)
    attention = base.layers[0].branches[0].block
    assert isinstance(attention, AttentionSpec)
    assert attention.qk_norm is not None
    latent = NormedLatentAttentionSpec(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        rank=config.integer("kv_lora_rank"),
        rotated=rotated,
        q_norm=attention.qk_norm.q,
        k_norm=attention.qk_norm.k,
        scale=attention.head_dim**-0.5,
        bias=attention.bias,
        o_bias=attention.o_bias,
        rotary=RotarySpec(interleaved=True),
        rope_heads=parts,
    )
    return _with_attention(config, base, latent, rotated // parts)


def _rotated(config: ConfigReader) -> tuple[int, int]:
    """Return the number of rotated elements of a query, and the number of parts that have the whole rotary table."""
    rotated, parts = config.integer("qk_rope_head_dim", 64), config.integer("qk_rope_heads", 1)
    if rotated % (2 * parts):
        raise config.error("qk_rope_heads", f"a number of parts into whose pairs {rotated} elements can be divided")
    return rotated, parts


def _with_attention(config: ConfigReader, base: DecoderSpec, attention: BlockSpec, width: int) -> DecoderSpec:
    """Return the decoder with this attention in all layers, and rotary tables of `width` elements.

    A table of fewer elements than a head has every n-th frequency of the head's table: both have the same base.
    """
    layers = []
    for layer in base.layers:
        first, *others = layer.branches
        layers.append(replace(layer, branches=(replace(first, block=attention), *others)))
    return replace(base, layers=tuple(layers), ropes=(config.rope(width),))
