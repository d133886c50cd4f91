"""Read the config of ERNIE 4.5 with experts: Llama with rotations of adjacent pairs, and experts in some layers."""

from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec, SharedSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated,
    read_head,
    read_norm,
)
from ingot.models.families.reading_experts import read_counts

# Layers for multi-token prediction are not used.
_NAMES = DecoderNames(unread=(*DecoderNames.unread, r"model\.mtp_.*"))


def ernie4_5_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of ERNIE 4.5 with experts describes.

    Every n-th layer of a range has experts, with n from `moe_layer_interval`. The range includes its end, and an end of
    -1 is the last layer.
    """
    bias, layers, norm = config.flag("use_bias", False), count_layers(config), read_norm(config, 1e-5)
    attention = read_attention(config, bias=bias, o_bias=bias, rotary=RotarySpec(interleaved=True))
    dense = read_gated(config, bias=bias)
    experts, top_k = read_counts(config, "moe_num_experts", "moe_k")
    router = RouterSpec(
        top_k,
        renormalize=True,
        least_sum=config.number("moe_norm_min", 1e-12),
        choice_bias="moe_statics.e_score_correction_bias",
        one_row=True,
        wide=True,
    )
    width, shared = config.integer("moe_intermediate_size"), config.count("moe_num_shared_experts", 2)
    part = GatedSpec(shared * width, dense.activation, bias=bias, names=GatedNames("shared_experts"))
    sparse = ExpertsSpec(experts, width, router, dense.activation, shared=SharedSpec(part) if shared else None)
    interval, start = config.integer("moe_layer_interval", 1), config.count("moe_layer_start_index", 1)
    end = config.fields.get("moe_layer_end_index")
    last = layers - 1 if end in (None, -1) else config.count("moe_layer_end_index", 0)
    decoder = [
        pre_norm_layer(attention, sparse if (index + 1) % interval == 0 and start <= index <= last else dense, norm)
        for index in range(layers)
    ]
    head, rope = read_head(config, tied=True, bias=bias), config.rope(attention.head_dim, theta=5e5)
    return read_decoder(config, decoder, norm, rope, head=head, names=_NAMES)
