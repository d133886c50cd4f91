"""MiMo-V2-Flash: the fields of published configs, which transformers does not read, and what is refused."""

from typing import Any

import pytest
from specs import specs
from tiny import TINY

from ingot.ir.errors import ConfigError
from ingot.models.architectures import read_spec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.experts import ExpertsSpec

# The fields of the published config.json that describe the computation, with fewer layers.
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "hidden_size": 4096,
    "num_hidden_layers": 6,
    "vocab_size": 152576,
    "intermediate_size": 16384,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 0, 1],
    "hybrid_block_size": None,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "attention_bias": False,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "rope_scaling": None,
    "layernorm_epsilon": 1e-5,
    "moe_layer_freq": [0, 1, 1, 0, 1, 1],
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def _attentions(**changes: Any) -> list[AttentionSpec]:
    return list(specs(read_spec({**PUBLISHED, **changes}).dims, AttentionSpec))


def test_the_published_fields_are_read() -> None:
    spec = read_spec(PUBLISHED)
    found = list(specs(spec.dims, AttentionSpec))
    # The field of windows does not count the own position.
    assert [one.window for one in found] == [None, 129, 129, 129, None, 129]
    assert [one.kv_heads for one in found] == [4, 8, 8, 8, 4, 8]
    assert [one.sinks for one in found] == [one.window is not None for one in found]
    assert {(one.heads, one.head_dim, one.value_width, one.v_scale) for one in found} == {(64, 192, 128, 0.707)}
    assert [one.rotary and one.rotary.table for one in found] == [0, 1, 1, 1, 0, 1]
    assert [(rope.theta, rope.rotary_dim) for rope in spec.dims.ropes] == [(5e6, 64), (1e4, 64)]
    assert [len(list(specs(layer, ExpertsSpec))) for layer in spec.dims.layers] == [0, 1, 1, 0, 1, 1]
    experts = next(specs(spec.dims, ExpertsSpec))
    assert experts.shared is None and experts.router.scale == 1.0 and experts.router.top_k == 8
    assert spec.max_position == 262144


def test_null_is_no_factor_on_values_and_a_missing_field_is_transformers_factor() -> None:
    assert {one.v_scale for one in _attentions(attention_value_scale=None)} == {None}
    missing = {name: value for name, value in PUBLISHED.items() if name != "attention_value_scale"}
    assert {one.v_scale for one in specs(read_spec(missing).dims, AttentionSpec)} == {0.707}


def test_a_window_without_the_published_field_counts_the_own_position() -> None:
    changes = {"sliding_window_size": None, "sliding_window": 128, "attention_chunk_size": None}
    assert {one.window for one in _attentions(**changes)} == {None, 128}


def test_kinds_of_layers_that_are_not_listed_are_transformers() -> None:
    changes = {"hybrid_layer_pattern": None, "moe_layer_freq": None, "num_hidden_layers": 13}
    dims = read_spec({**PUBLISHED, **changes}).dims
    assert [index for index, one in enumerate(specs(dims, AttentionSpec)) if one.window is None] == [0, 5, 11]
    assert len(list(specs(dims, ExpertsSpec))) == 12


def test_a_published_field_may_repeat_what_transformers_calls_otherwise() -> None:
    types = ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"]
    assert _attentions(layer_types=types) == _attentions()
    assert read_spec({**PUBLISHED, "rms_norm_eps": 1e-5}).dims == read_spec(PUBLISHED).dims
    with pytest.raises(ConfigError, match="layernorm_epsilon"):
        read_spec({**PUBLISHED, "rms_norm_eps": 1e-6})


def test_heads_that_do_not_divide_are_refused_in_both_kinds_of_layers() -> None:
    config = TINY["mimo_v2_flash-listed"].config
    with pytest.raises(ConfigError, match="8 attention heads over 3 key-value heads"):
        read_spec({**config, "num_key_value_heads": 3})
    with pytest.raises(ConfigError, match="a divisor of 8 heads, also when doubled"):
        read_spec({**config, "num_key_value_heads": 8})
