"""Read the configs of Qwen 2 and 3 with experts. Some layers may have dense feed-forward parts.

Qwen 2 has a shared expert with a gate of its own.
"""

from collections.abc import Sequence

from ingot.models.blocks.attention import AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec, SharedSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    SILU,
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_norm,
    read_windows,
)
from ingot.models.families.reading_experts import read_counts, read_layer_indices


def qwen2_moe(config: ConfigReader) -> DecoderSpec:
    width = config.integer("shared_expert_intermediate_size", 5632)
    mlp = GatedSpec(width, config.choice("hidden_act", SILU, "silu"), names=GatedNames("shared_expert"))
    attention = read_attention(config, bias=config.flag("qkv_bias", True))
    return _qwen(config, _qwen2_attentions(config, attention), SharedSpec(mlp, "shared_expert_gate"))


def qwen3_moe(config: ConfigReader) -> DecoderSpec:
    attention = read_attention(config, qk_norm=QKNormSpec.of(read_norm(config)), **read_biases(config))
    sliding = config.flag("use_sliding_window", False)
    if "sliding_window" in config.fields and config.integer_or_none("sliding_window") is None:
        sliding = False
    return _qwen(config, read_windows(config, attention, (sliding,) * count_layers(config), default=4096), None)


def _qwen2_attentions(config: ConfigReader, attention: AttentionSpec) -> list[AttentionSpec]:
    """Return the attention of each layer of Qwen 2.

    With `use_sliding_window`, some layers have a window. The field `layer_types` names them. Without it, they are every
    other one of the first `max_window_layers` layers (transformers, configuration_qwen2_moe.py).
    """
    layers = count_layers(config)
    if not config.flag("use_sliding_window", False):
        return [attention] * layers
    types = config.listed("layer_types", layers, ("sliding_attention", "full_attention"))
    if types is None:
        last = config.integer("max_window_layers", 28)
        sliding = tuple(index % 2 == 0 and index < last for index in range(layers))
    else:
        sliding = tuple(kind == "sliding_attention" for kind in types)
    return read_windows(config, attention, sliding, default=4096)


def _qwen(config: ConfigReader, attentions: Sequence[AttentionSpec], shared: SharedSpec | None) -> DecoderSpec:
    """Return the spec of a Qwen decoder with experts.

    Every n-th layer has experts, with n from `decoder_sparse_step`, except the layers of the list `mlp_only_layers`.
    """
    experts, top_k = read_counts(config, "num_experts")
    dense, norm = read_gated(config), read_norm(config)
    router = RouterSpec(top_k, renormalize=config.flag("norm_topk_prob", False))
    width = config.integer("moe_intermediate_size")
    sparse = ExpertsSpec(experts, width, router, dense.activation, shared=shared)
    step = config.integer("decoder_sparse_step", 1)
    without = read_layer_indices(config, "mlp_only_layers", len(attentions)) or ()
    layers = [
        pre_norm_layer(attention, dense if (index + 1) % step or index in without else sparse, norm)
        for index, attention in enumerate(attentions)
    ]
    return read_decoder(config, layers, norm, config.rope(attentions[0].head_dim))
