"""DeepSeek-V3.2: latent attention of the positions that an indexer chooses (transformers, modeling_deepseek_v32.py)."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import expert_weights
from mutations import Change, Mutation, Params, always, each, some, without

from families.deepseek import CUT, OPTIONAL, YARN, bad, random_v3, tiny, weights
from families.family import Family
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.indexer import IndexerNames, IndexerSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec

_V32 = "DeepseekV32ForCausalLM"
# Fewer positions than most prompts have. With few heads, scores of several positions would be zero.
_INDEXER = {"index_n_heads": 14, "index_head_dim": 22, "index_topk": 9}


def _random_v32(draw: random.Random) -> dict[str, Any]:
    """Transformers ignores `rope_interleave`, and of few heads of an indexer scores are equal: all are zero."""
    config = random_v3(draw)
    config.pop("rope_interleave", None)
    config |= {
        "q_lora_rank": draw.randint(1, 40),
        "index_n_heads": draw.randint(14, 20),
        "index_head_dim": config["qk_rope_head_dim"] + draw.randint(0, 20),
        "index_topk": draw.randint(1, 60),
    }
    return config


FAMILIES = (
    Family(
        "deepseek_v32",
        _V32,
        tiny=(
            tiny(
                "deepseek_v32-few",
                _V32,
                0,
                q_lora_rank=22,
                rope_scaling=YARN,
                n_group=4,
                topk_group=2,
                routed_scaling_factor=1.7,
                n_shared_experts=2,
                **_INDEXER,
            ),
            tiny(
                "deepseek_v32-listed",
                _V32,
                1,
                q_lora_rank=30,
                mlp_layer_types=["sparse", "dense", "sparse"],
                first_k_dense_replace=...,
                norm_topk_prob=False,
                n_group=1,
                topk_group=1,
                routed_scaling_factor=0.6,
                attention_bias=True,
                **{**_INDEXER, "index_n_heads": 17, "index_head_dim": 8, "index_topk": 23},
            ),
        ),
        weights=weights,
        restored=expert_weights.stacked(),
        random=_random_v32,
        cut={**CUT, "n_routed_experts": 8, "mlp_layer_types": ["sparse"], **_INDEXER},
        optional=OPTIONAL | {"norm_topk_prob"},
        own_optional=frozenset({"mlp_layer_types", "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk"}),
        bad=(
            *(one for one in bad("deepseek_v32-few") if one[1] != "q_lora_rank"),
            ("deepseek_v32-few", "q_lora_rank", 0),
            ("deepseek_v32-few", "rope_interleave", False),
            ("deepseek_v32-few", "index_topk", 0),
            ("deepseek_v32-few", "index_head_dim", 7),
            ("deepseek_v32-few", "index_n_heads", "64"),
            ("deepseek_v32-few", "layer_types", ["full_attention"] * 3),
            ("deepseek_v32-few", "mlp_bias", True),
            ("deepseek_v32-few", "mlp_layer_types", ["dense", "sparse"]),
        ),
    ),
)


def _weights_of_next(params: Params, dims: DecoderSpec) -> None:
    """Each head of an indexer has the weights of the next head."""
    for name in [name for name in params if name.endswith("indexer.weights.weight")]:
        params[name] = params[name].roll(1, 0)


_INDEXED = some(IndexerSpec, always)
MUTATIONS = (
    without(LatentAttentionSpec, "indexer", None),
    *(
        Mutation(
            f"{number:+} chosen position",
            "IndexerSpec.top_k",
            _INDEXED,
            each(IndexerSpec, lambda one, number=number: replace(one, top_k=one.top_k + number)),
        )
        for number in (-1, 1)
    ),
    Mutation("an indexer's weights of the next head", "IndexerSpec.heads", _INDEXED, params=_weights_of_next),
    Mutation(
        "an indexer's keys without their norm's own kind",
        "IndexerSpec.k_norm",
        _INDEXED,
        each(IndexerSpec, lambda one: replace(one, k_norm=replace(one.k_norm, kind="rms", bias=False))),
    ),
    Mutation(
        "an indexer's keys without the norm's bias",
        "IndexerSpec.k_norm",
        _INDEXED,
        each(IndexerSpec, lambda one: replace(one, k_norm=replace(one.k_norm, bias=False))),
    ),
    Mutation(
        "an indexer that rotates other pairs",
        "IndexerSpec.rotary",
        _INDEXED,
        each(IndexerSpec, lambda one: replace(one, rotary=replace(one.rotary, interleaved=True))),
    ),
)
SIZES: Mapping[str, Change] = {
    "IndexerSpec.heads": each(IndexerSpec, lambda one: replace(one, heads=one.heads + 1)),
    "IndexerSpec.width": each(IndexerSpec, lambda one: replace(one, width=one.width + 1)),
}
STORAGE = ("IndexerSpec.names",)
NAMES = (IndexerNames,)
