"""Read the config of Step3's text part: queries made of a latent, one head of keys and values, and experts.

The code that is published with the model (modeling_step3.py) and vLLM's (step3_text.py) define what fields mean. Fields
that they do not read have no meaning here either, such as `moe_router_activation`: scores are always a softmax.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from ingot.models.blocks.attention import AttentionSpec, QLatentSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.expert_names import ExpertNames
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec, SharedSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.config import MAX_LAYERS, ConfigReader, RopeSpec
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_norm,
    read_rope,
)
from ingot.models.families.reading_experts import read_counts, read_layer_indices

# Step3TextConfig (configuration_step3.py), which is published with the model, has these and the other defaults here.
CONTEXT = 65_536
_LATENT, _WIDTH = 2048, 5120
# Types whose tables do not depend on the length of a sequence.
_ROPES = ("default", "linear", "llama3", "yarn")
_EXPERTS = ExpertNames("moe.gate_proj.weight", "moe.up_proj.weight", "moe.down_proj.weight")
_OTHER_PARTS = r"(model\.)?(vision_model|vit_downsampler2?|vit_large_projector)\..*"
# The text of a list of layers has as many digits as the largest index, at most.
_INDEX = rf"\s*[0-9]{{1,{len(str(MAX_LAYERS))}}}\s*"


def step3_text(config: ConfigReader) -> DecoderSpec:
    config.require("tie_word_embeddings", (False,), False)
    layers, norm, dense = count_layers(config), read_norm(config, 1e-5), read_gated(config)
    attention, with_experts = _read_attention(config, norm), _read_moe_layers(config, layers)
    sparse = _read_experts(config, dense.activation) if with_experts else dense
    decoder = [pre_norm_layer(attention, sparse if index in with_experts else dense, norm) for index in range(layers)]
    return read_decoder(config, decoder, norm, _read_rope(config, attention.head_dim))


def text_part(config: ConfigReader) -> DecoderSpec:
    """Return the spec of the text model in a config.json of the multimodal Step3.

    The tensors of the vision model and of its projector are not read: only token ids enter the model.
    """
    return replace(step3_text(config), names=DecoderNames(unread=(*DecoderNames.unread, _OTHER_PARTS)))


def _read_attention(config: ConfigReader, norm: NormSpec) -> AttentionSpec:
    """Return the attention of all layers. `norm` is the spec of the decoder's norms.

    A latent of q that is null has the size of a head, as in vLLM.
    """
    for field in ("num_attention_groups", "num_key_value_heads"):
        config.require(field, (1,), 1)
    attention = read_attention(config, head_dim=256)
    rank = config.integer("share_q_dim", attention.head_dim if "share_q_dim" in config.fields else _LATENT)
    return replace(attention, kv_heads=1, q_latent=QLatentSpec(rank, norm.named("inter_norm"), up="wq"))


def _read_moe_layers(config: ConfigReader, layers: int) -> Sequence[int]:
    """Return the indices of the layers with experts. Null means all layers but the first.

    The field `moe_layers_enum` lists them, with commas in a text. The published code has no meaning for a missing one.
    """
    field = "moe_layers_enum"
    value = config.fields.get(field)
    if isinstance(value, str) and re.fullmatch(rf"{_INDEX}(,{_INDEX})*", value):
        config = config.within({field: [int(index) for index in value.split(",")]})
    elif isinstance(value, str) or field not in config.fields:
        raise config.error(field, f'layers from 0 to {layers - 1}, such as "1,2,3"')
    listed = read_layer_indices(config, field, layers)
    return range(1, layers) if listed is None else listed


def _read_experts(config: ConfigReader, activation: str) -> ExpertsSpec:
    experts, top_k = read_counts(config, "moe_num_experts", "moe_top_k")
    router = RouterSpec(top_k, renormalize=config.flag("norm_expert_weight", False), stored="moe.gate")
    shared = GatedSpec(config.integer("share_expert_dim", _WIDTH), activation, names=GatedNames("share_expert"))
    return ExpertsSpec(
        experts,
        config.integer("moe_intermediate_size", _WIDTH),
        router,
        activation,
        shared=SharedSpec(shared),
        place="",
        names=_EXPERTS,
    )


def _read_rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Return the rotary embedding. Scaling starts from the context in `max_position_embedding`."""
    context = config.integer("max_position_embedding", CONTEXT)
    config = config.within({**config.fields, "max_position_embeddings": context})
    return read_rope(config, head_dim, _ROPES, theta=5e5)
