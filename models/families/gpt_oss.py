"""Read the config of GPT-OSS: experts with biases and a clamped gate, attention sinks, windows in every other layer."""

from typing import Any

from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.expert_names import ExpertNames
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    SILU,
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_norm,
    read_windows,
)
from ingot.models.families.reading_experts import read_counts

# Transformers, configuration_gpt_oss.py.
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_FLOATS = ExpertNames(gate_up="experts.gate_up_proj", down="experts.down_proj", transposed=True, alternating=True)
# A quantized checkpoint has these weights, whatever its tensors are (frontend/quantized/experts.py).
_MXFP4 = ExpertNames(gate_up="experts.{}.gate_up_proj.weight", down="experts.{}.down_proj.weight", alternating=True)


def gpt_oss(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of GPT-OSS describes.

    The field `layer_types` names the layers with a window. Without it, they are every other layer, from the first one
    on. Experts are stored as floats, or as MXFP4.
    """
    layers, norm = count_layers(config), read_norm(config, 1e-5, wide=True)
    experts, top_k = read_counts(config, "num_local_experts")
    config.require("experts_per_token", (top_k,), top_k)
    config.choice("hidden_act", SILU, "silu")  # the gate is always the clamped one
    quantized = config.fields.get("quantization_config")
    mlp = ExpertsSpec(
        experts,
        config.integer("intermediate_size"),
        RouterSpec(top_k, renormalize=True, bias=True, stored="router"),
        "clamped",
        limit=config.number("swiglu_limit", 7.0),
        alpha=config.number("swiglu_alpha", 1.702),
        bias=True,
        names=_MXFP4 if isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4" else _FLOATS,
    )
    bias = config.flag("attention_bias", True)
    attention = read_attention(config, head_dim=64, bias=bias, o_bias=bias, sinks=True)
    attentions = read_windows(config, attention, config.sliding_layers(layers, pattern=2), default=128)
    if config.fields.get("rope_parameters") is None and config.fields.get("rope_scaling") is None:
        config = config.within({**config.fields, "rope_scaling": _ROPE})
    given = config.fields.get("rope_parameters") or config.fields.get("rope_scaling")
    original = given.get("original_max_position_embeddings") if isinstance(given, dict) else None
    config.require("initial_context_length", (original,), original)  # the same length, in published files
    rope = config.rope(attention.head_dim, theta=150_000.0)
    return read_decoder(config, [pre_norm_layer(one, mlp, norm) for one in attentions], norm, rope)
