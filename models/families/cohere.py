"""Read the configs of Cohere's Command models: layer norms without biases, attention and MLP in parallel."""

from ingot.models.blocks.attention import AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
    read_windows,
)

# Fields in configurations of Command R7B and later. Transformers does not read them, and always behaves this way.
_SAID_OF_COHERE2 = {
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_embedding_sharing": True,
    "use_qk_norm": False,
}


def cohere(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Cohere describes. Norms of q and k have different weights for each head."""
    qk_norm = QKNormSpec.of(_norm(config), over="each head") if config.flag("use_qk_norm", False) else None
    return _cohere(config, [_attention(config, qk_norm)] * count_layers(config), theta=5e5)


def cohere2(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Cohere 2 describes.

    Every fourth layer has no window and no rotary embedding. All other layers have both.
    """
    for field, value in _SAID_OF_COHERE2.items():
        config.require(field, (value,), value)
    pattern = config.integer("sliding_window_pattern", 4)
    config.require("layer_switch", (pattern,), pattern)
    sliding = config.sliding_layers(count_layers(config), pattern)
    return _cohere(config, read_windows(config, _attention(config), sliding, 4096, tables=(None, 0)))


def _norm(config: ConfigReader) -> NormSpec:
    return read_norm(config, 1e-5, "layer_norm_eps", kind="layer", wide=True)


def _attention(config: ConfigReader, qk_norm: QKNormSpec | None = None) -> AttentionSpec:
    return read_attention(config, rotary=RotarySpec(interleaved=True), qk_norm=qk_norm, **read_biases(config))


def _cohere(config: ConfigReader, attentions: list[AttentionSpec], theta: float = 10000.0) -> DecoderSpec:
    norm, mlp = _norm(config), BranchSpec("mlp", read_gated(config))  # without a norm: it reads attention's input
    layers = [
        LayerSpec((BranchSpec("attention", one, norm.named("input_layernorm")), mlp), parallel=True)
        for one in attentions
    ]
    head = read_head(config, tied=True, scale=config.number("logit_scale", 0.0625))
    return read_decoder(config, layers, norm, config.rope(attentions[0].head_dim, theta=theta), head=head)
