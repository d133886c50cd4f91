"""Read the config of Gemma 3n's text part: AltUp streams, LAuReL, per-layer embeddings, layers that share KV caches."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from ingot.models.blocks.altup import AltUpSpec
from ingot.models.blocks.attention import AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderNames
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.laurel import LaurelSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.per_layer_embedding import PerLayerEmbeddingSpec, PerLayerInputSpec
from ingot.models.blocks.shared_attention import SharedAttentionSpec
from ingot.models.blocks.stream_decoder import StreamDecoderSpec
from ingot.models.blocks.stream_layer import StreamLayerSpec
from ingot.models.config import ConfigReader
from ingot.models.families.gemma import GELU, read_cap, read_gemma_ropes
from ingot.models.families.reading import (
    count_layers,
    read_attention,
    read_biases,
    read_gated,
    read_head,
    read_norm,
    read_windows,
)

# Transformers, configuration_gemma3n.py.
_FULL_EVERY = 5  # every fifth layer has no window, without `layer_types`
_SPARSE = (10, 0.95)  # in deeper models: the number of first layers with sparse gates, and the share of zero gates
# In checkpoints with images and sound, the text part is in `model.language_model`.
_TEXT = "model.language_model"
_OTHER_PARTS = r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*"


def gemma3n(config: ConfigReader, place: str = "model") -> StreamDecoderSpec:
    config = config.within({"num_key_value_heads": 2, **config.fields})
    layers, norm = count_layers(config), read_norm(config, wide=True)
    hidden, width = config.integer("hidden_size"), config.integer("hidden_size_per_layer_input", 256)
    attention = read_attention(
        config,
        head_dim=256,
        scale=1.0,
        qk_norm=QKNormSpec.of(norm),
        v_norm=replace(norm, gains=False),
        **read_biases(config),
    )
    sliding = config.sliding_layers(layers, _FULL_EVERY)
    attentions = read_windows(config, attention, sliding, 512, tables=(0, 1))
    altup = _read_altup(config, norm)
    mlps = _read_mlps(config, layers)
    of_layer = PerLayerInputSpec(
        width,
        norm.named("post_per_layer_input_norm"),
        mlps[0].activation,
        scaled=config.flag("altup_correct_scale", True),
    )
    laurel = LaurelSpec(config.integer("laurel_rank", 64), norm.named("post_laurel_norm"))
    shared = _with_shared_caches(config, attentions, sliding)
    return StreamDecoderSpec(
        vocab=config.integer("vocab_size"),
        hidden=hidden,
        layers=tuple(
            StreamLayerSpec(one, mlp, altup, laurel, of_layer, norm) for one, mlp in zip(shared, mlps, strict=True)
        ),
        altup=altup,
        inputs=PerLayerEmbeddingSpec(
            config.integer("vocab_size_per_layer_input", 262_144),
            layers,
            width,
            norm.named("per_layer_projection_norm"),
        ),
        norm=norm,
        ropes=read_gemma_ropes(config, attention.head_dim),
        embedding=EmbeddingSpec(scale=hidden**0.5, rounded=True),
        head=read_head(config, tied=True, soft_cap=read_cap(config, "final_logit_softcapping", 30.0)),
        names=_names(place, shared, of_layer),
    )


def text_part(config: ConfigReader) -> StreamDecoderSpec:
    """Return the spec of the text model in a config.json of the multimodal Gemma 3n."""
    return gemma3n(config, _TEXT)


def _names(
    place: str, attentions: Sequence[AttentionSpec | SharedAttentionSpec], of_layer: PerLayerInputSpec
) -> DecoderNames:
    """Return the tensor names of a Gemma 3n decoder in a checkpoint. `place` is the prefix of all names.

    It also lists the tensors that are not read. Among them are k and v of layers that read another layer's cache, and
    the vision and audio parts.
    """
    sharing = [str(index) for index, one in enumerate(attentions) if isinstance(one, SharedAttentionSpec)]
    unread = [*DecoderNames.unread]
    if sharing:
        unread.append(rf"{place}\.layers\.({'|'.join(sharing)})\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)")
    if not of_layer.scaled:
        unread.append(rf"{place}\.layers\.\d+\.altup\.correct_output_scale")
    if place == _TEXT:
        unread.append(_OTHER_PARTS)
    return DecoderNames(place, unread=tuple(unread))


def _read_altup(config: ConfigReader, norm: NormSpec) -> AltUpSpec:
    """Return the number of residual streams (AltUp), and which of them the layers compute.

    `norm` is the spec of the router's norm.
    """
    streams = config.integer("altup_num_inputs", 4)
    if streams < 2:
        raise config.error("altup_num_inputs", "at least 2")
    active = config.fields.get("altup_active_idx")
    active = 0 if active is None else active
    if not isinstance(active, int) or isinstance(active, bool) or not 0 <= active < streams:
        raise config.error("altup_active_idx", f"one of {streams} streams, from 0")
    return AltUpSpec(streams, active, norm.named("router_norm"))


def _read_mlps(config: ConfigReader, layers: int) -> list[GatedSpec]:
    """Return the feed-forward part of each of `layers` layers. Width and sparsity may differ between layers."""
    widths = config.fields.get("intermediate_size")
    widths = widths if isinstance(widths, list) else [widths] * layers
    if len(widths) != layers:
        raise config.error("intermediate_size", f"a size, or a list of {layers}")
    one_each = [config.within({**config.fields, "intermediate_size": width}) for width in widths]
    mlps = [read_gated(one, activations=GELU, activation_field="hidden_activation") for one in one_each]
    return [
        replace(mlp, cutoff=NormalDist().inv_cdf(part) if part else None)
        for mlp, part in zip(mlps, _read_sparsities(config, layers), strict=True)
    ]


def _read_sparsities(config: ConfigReader, layers: int) -> list[float]:
    """Return for each of `layers` layers the share of its gates that the model sets to zero, from 0 to below 1."""
    found = config.fields.get("activation_sparsity_pattern")
    if found is None:
        sparse, part = _SPARSE
        return [part if layers > sparse and index < sparse else 0.0 for index in range(layers)]
    valid = isinstance(found, list) and all(
        isinstance(part, int | float) and not isinstance(part, bool) and 0 <= part < 1 for part in found
    )
    if not valid or len(found) != layers:
        raise config.error("activation_sparsity_pattern", f"a list of {layers} numbers from 0 to below 1")
    return [float(part) for part in found]


def _with_shared_caches(
    config: ConfigReader, attentions: Sequence[AttentionSpec], sliding: Sequence[bool]
) -> list[AttentionSpec | SharedAttentionSpec]:
    """Return the attentions of all layers. The last `num_kv_shared_layers` ones read the KV cache of an earlier layer.

    It is the last layer that has a cache and the same type, with a window or without. `sliding` says for each layer
    whether it has a window.
    """
    layers, count = len(attentions), config.fields.get("num_kv_shared_layers")
    count = 15 if count is None else count
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < layers:
        raise config.error("num_kv_shared_layers", f"a number of layers, from 0 to {layers - 1}")
    first = layers - count
    last = {slides: index for index, slides in enumerate(sliding[:first])}
    if set(sliding) != last.keys():
        raise config.error("num_kv_shared_layers", "a layer of each type before those that share its cache")
    return [
        attention if index < first else SharedAttentionSpec(attention, last[sliding[index]])
        for index, attention in enumerate(attentions)
    ]
