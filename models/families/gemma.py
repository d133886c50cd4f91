"""Read the configs of Gemma 1 to 3: scaled embeddings, norm weights stored minus one.

From Gemma 2 on, blocks have norms before and after.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ingot.models.blocks.attention import AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import ConfigReader, RopeSpec
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
    read_two_ropes,
    read_windows,
)

GELU = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _two_norms_layer(attention: AttentionSpec, mlp: GatedSpec, norm: NormSpec) -> LayerSpec:
    """Return a layer with a norm before and after attention, and before and after the feed-forward part.

    `norm` is the spec of all four norms.
    """
    before, after = norm.named("input_layernorm"), norm.named("post_attention_layernorm")
    branches = (
        BranchSpec("attention", attention, before, after),
        BranchSpec("mlp", mlp, norm.named("pre_feedforward_layernorm"), norm.named("post_feedforward_layernorm")),
    )
    return LayerSpec(branches)


def gemma(config: ConfigReader) -> DecoderSpec:
    # The first checkpoints say "gelu" but use its tanh form (transformers, configuration_gemma.py). Some repeat it
    # under the field name of Gemma 2.
    config.require("hidden_activation", (None, *GELU), None)
    mlp = read_gated(config, activations=dict.fromkeys(GELU, "gelu_tanh"))
    attention = _attention(config)
    rope = config.rope(attention.head_dim)
    return _gemma(config, [attention] * count_layers(config), mlp, rope, layer=pre_norm_layer)


def gemma2(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Gemma 2 describes. By default, layers 0, 2, 4 and so on have a window."""
    attention = replace(_scaled_attention(config), soft_cap=read_cap(config, "attn_logit_softcapping", 50.0))
    sliding = config.sliding_layers(count_layers(config), pattern=2)
    attentions, rope = read_windows(config, attention, sliding, 4096), config.rope(attention.head_dim)
    return _gemma(config, attentions, _mlp(config), rope, logit_cap=read_cap(config, "final_logit_softcapping", 30.0))


def gemma3(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Gemma 3 describes.

    Layers with a window have a different rotary base than layers without one.
    """
    config.require("attn_logit_softcapping", (None,), None)  # transformers reads it and does not apply it
    attention = replace(_scaled_attention(config), qk_norm=QKNormSpec.of(_norm(config)))
    pattern = config.integer("sliding_window_pattern", 6)
    if config.fields.get("layer_types") is None:  # transformers writes this name, and reads the other
        config.require("_sliding_window_pattern", (pattern,), pattern)
    sliding = config.sliding_layers(count_layers(config), pattern)
    attentions = read_windows(config, attention, sliding, 4096, tables=(0, 1))
    full, local = read_gemma_ropes(config, attention.head_dim)
    cap = read_cap(config, "final_logit_softcapping", None)
    return _gemma(config, attentions, _mlp(config), full, local, logit_cap=cap)


def _gemma(
    config: ConfigReader,
    attentions: Iterable[AttentionSpec],
    mlp: GatedSpec,
    *ropes: RopeSpec,
    layer: Callable[[AttentionSpec, GatedSpec, NormSpec], LayerSpec] = _two_norms_layer,
    logit_cap: float | None = None,
) -> DecoderSpec:
    """Return the spec of a Gemma decoder. It adds the parts that all Gemmas share: norms, embedding and head.

    attentions   attention of each layer
    mlp          feed-forward part of all layers
    ropes        rotary embeddings, which the attentions refer to by index
    layer        makes a layer from an attention, a feed-forward part and a norm
    logit_cap    soft cap on logits; None: no cap
    """
    config.require("use_bidirectional_attention", (False,), False)
    norm = _norm(config)
    embedding = EmbeddingSpec(scale=config.integer("hidden_size") ** 0.5, rounded=True)
    head = read_head(config, tied=True, soft_cap=logit_cap)
    layers = [layer(attention, mlp, norm) for attention in attentions]
    return read_decoder(config, layers, norm, *ropes, head=head, embedding=embedding)


def read_gemma_ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Return the two rotary embeddings of a Gemma model: for layers without a window, and for layers with one."""
    full, local = read_two_ropes(config, head_dim, full=1e6, sliding=1e4)
    if config.fields.get("rope_parameters") is None:  # `rope_theta` is the base of the first table only
        local = replace(local, theta=config.number("rope_local_base_freq", 1e4))
    return full, local


def _norm(config: ConfigReader) -> NormSpec:
    return read_norm(config, wide=True, offset=1.0)


def _attention(config: ConfigReader, **fields: Any) -> AttentionSpec:
    return read_attention(config, head_dim=256, **read_biases(config), **fields)


def _scaled_attention(config: ConfigReader) -> AttentionSpec:
    return _attention(config, scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5)


def _mlp(config: ConfigReader) -> GatedSpec:
    return read_gated(config, activations=GELU, activation_field="hidden_activation")


def read_cap(config: ConfigReader, field: str, default: float | None) -> float | None:
    """Return the soft cap in a field; None if the field is null, and `default` if it is missing."""
    return config.number_or_none(field) if field in config.fields else default
