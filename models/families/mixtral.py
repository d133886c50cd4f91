"""Read the config of Mixtral: Llama with experts in place of feed-forward parts."""

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
)
from ingot.models.families.reading_experts import read_counts

NAMES = ExpertNames("experts.{}.w1.weight", "experts.{}.w3.weight", "experts.{}.w2.weight")


def mixtral(config: ConfigReader) -> DecoderSpec:
    experts, top_k = read_counts(config, "num_local_experts")
    mlp = ExpertsSpec(
        experts,
        config.integer("intermediate_size"),
        RouterSpec(top_k, renormalize=True),
        config.choice("hidden_act", SILU, "silu"),
        place="block_sparse_moe",
        names=NAMES,
    )
    attention, norm = read_attention(config, window=config.integer_or_none("sliding_window")), read_norm(config, 1e-5)
    layer = pre_norm_layer(attention, mlp, norm)
    return read_decoder(config, [layer] * count_layers(config), norm, config.rope(attention.head_dim, theta=1e6))
