"""Read the config of Llama 4's text part: chunked attention, layers without positions, and experts with one choice.

Layers without a rotary embedding attend to the whole context, and their queries grow with the position. The other
layers attend within chunks, and norm q and k after the rotation.
"""

from collections.abc import Sequence
from dataclasses import replace

from ingot.models.blocks.attention import AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.expert_names import ExpertNames
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec, SharedSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import PositionScaleSpec, RotarySpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    SILU,
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_head,
    read_norm,
)
from ingot.models.families.reading_experts import read_counts, read_layer_indices

# Transformers, configuration_llama4.py.
_PERIOD = 8192  # of chunks, and of the growth of queries
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_EXPERTS = ExpertNames(gate_up="experts.gate_up_proj", down="experts.down_proj", transposed=True)
# In checkpoints with images, the text part is in `language_model`.
_TEXT = "language_model"
_OTHER_PARTS = r"(vision_model|multi_modal_projector)\..*"


def llama4(config: ConfigReader) -> DecoderSpec:
    norm = read_norm(config, 1e-5)
    attentions = _read_attentions(config, norm)
    dense = GatedSpec(
        config.integer("intermediate_size_mlp", 16_384),
        config.choice("hidden_act", SILU, "silu"),
        names=GatedNames("feed_forward"),
    )
    with_experts = _read_moe_layers(config, len(attentions))
    sparse = _read_experts(config, dense.activation) if with_experts else dense
    layers = [
        pre_norm_layer(attention, sparse if index in with_experts else dense, norm)
        for index, attention in enumerate(attentions)
    ]
    return read_decoder(config, layers, norm, config.rope(attentions[0].head_dim, theta=5e5))


def text_part(config: ConfigReader) -> DecoderSpec:
    """Return the spec of the text model in a config.json of the multimodal Llama 4.

    The tensors of the vision model and of its projector are not read: only token ids enter the model.
    """
    names = DecoderNames(f"{_TEXT}.model", unread=(*DecoderNames.unread, _OTHER_PARTS))
    return replace(llama4(config), names=names, head=read_head(config, stored=f"{_TEXT}.lm_head"))


def _read_attentions(config: ConfigReader, norm: NormSpec) -> list[AttentionSpec]:
    """Return the attention of each layer. `norm` is the spec of the decoder's norms.

    The list `no_rope_layers` has a 0 for each layer without a rotary embedding. If it is missing or empty, they are
    every n-th layer, with n from `no_rope_layer_interval`. The list `layer_types` names the layers with chunks. If it
    is missing, they are the rotated layers.
    """
    layers, attention = count_layers(config), read_attention(config, head_dim=128, **read_biases(config))
    rotated = config.listed("no_rope_layers", layers, (0, 1)) if config.fields.get("no_rope_layers") != [] else None
    if rotated is None:
        interval = config.integer("no_rope_layer_interval", 4)
        rotated = tuple(int((index + 1) % interval != 0) for index in range(layers))
    # Null means no chunks; missing, they have the default size.
    chunk = config.integer_or_none("attention_chunk_size") if "attention_chunk_size" in config.fields else _PERIOD
    types = config.listed("layer_types", layers, (_CHUNKED, _FULL))
    if types is None:
        types = tuple(_CHUNKED if keep and chunk is not None else _FULL for keep in rotated)
    if chunk is None and _CHUNKED in types:
        raise config.error("attention_chunk_size", f"a number of positions, for the layers of type {_CHUNKED}")
    unit = replace(norm, gains=False)
    qk_norm = QKNormSpec(unit, unit, after_rotation=True) if config.flag("use_qk_norm", True) else None
    of_rotated = replace(attention, rotary=RotarySpec(interleaved=True), qk_norm=qk_norm)
    others = replace(attention, rotary=None, q_scale=_read_q_scale(config))
    return [
        replace(of_rotated if keep else others, chunk=chunk if kind == _CHUNKED else None)
        for keep, kind in zip(rotated, types, strict=True)
    ]


def _read_q_scale(config: ConfigReader) -> PositionScaleSpec | None:
    """Return the factor on queries of layers without a rotary embedding; None if the config disables it.

    Early configs have a number in `attn_temperature_tuning`, and any number but 0 enables it, as in transformers.
    """
    tuned = config.fields.get("attn_temperature_tuning")
    if tuned is not None and not isinstance(tuned, bool | int):
        raise config.error("attn_temperature_tuning", "true or false, or a whole number")
    period, strength = config.integer("floor_scale", _PERIOD), config.number("attn_scale", 0.1)
    return PositionScaleSpec(period, strength, shift=1) if tuned is None or tuned else None


def _read_moe_layers(config: ConfigReader, layers: int) -> Sequence[int]:
    """Return the indices of the layers with experts.

    The field `moe_layers` lists them. If it is missing, they are every n-th layer, with n from
    `interleave_moe_layer_step`.
    """
    listed = read_layer_indices(config, "moe_layers", layers)
    if listed is not None:
        return listed
    step = config.integer("interleave_moe_layer_step", 1)
    return range(step - 1, layers, step)


def _read_experts(config: ConfigReader, activation: str) -> ExpertsSpec:
    experts, top_k = read_counts(config, "num_local_experts")
    width = config.integer("intermediate_size")
    return ExpertsSpec(
        experts,
        width,
        RouterSpec(top_k, scores="sigmoid", by_logits=True, stored="router"),
        activation,
        weigh_input=True,
        shared=SharedSpec(GatedSpec(width, activation, names=GatedNames("shared_expert"))),
        place="feed_forward",
        names=_EXPERTS,
    )
