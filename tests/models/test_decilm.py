"""Nemotron-NAS: widths of feed-forward parts, what a layer may lack, and blocks that are refused."""

from typing import Any

import pytest
from specs import specs
from tiny import TINY

from ingot.ir.errors import ConfigError
from ingot.models.architectures import read_spec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.feed_forward import GatedSpec

ATTENTION, NONE = {"n_heads_in_group": 2}, {"no_op": True}


def read(attention: dict[str, Any], ffn: dict[str, Any], **fields: Any) -> Any:
    """A model of one layer of these parts."""
    block = {"attention": attention, "ffn": ffn}
    config = {**TINY["nemotron_nas-blocks"].config, "num_hidden_layers": 1, "block_configs": [block], **fields}
    return read_spec(config).dims


# Llama 3's 70B is 28672 wide, which is 5.25 here; int() cuts before the next multiple of 256 (modeling_decilm.py).
@pytest.mark.parametrize(
    ("hidden", "mult", "width"),
    [(8192, 5.25, 28672), (8192, 2.625, 14336), (8192, 0.5, 2816), (96, 8.0, 512), (96, 8.01, 512)],
)
def test_a_multiple_is_of_two_thirds_and_rounded_up(hidden: int, mult: float, width: int) -> None:
    spec = read(NONE, {"ffn_mult": mult}, hidden_size=hidden, num_attention_heads=2)
    assert next(specs(spec, GatedSpec)).width == width


def test_a_layer_may_be_empty() -> None:
    spec = read(NONE, NONE)
    assert spec.layers[0].branches == () and spec.ropes == ()


def test_fields_of_what_is_left_out_are_not_read() -> None:
    left_out = {"no_op": True, "n_heads_in_group": None, "window_length": None, "ffn_mult": None}
    assert read(left_out, left_out) == read(NONE, NONE)


def test_a_window_is_of_its_layer() -> None:
    assert [one.window for one in specs(read({**ATTENTION, "window_length": 7}, NONE), AttentionSpec)] == [7]


@pytest.mark.parametrize(
    ("field", "attention", "ffn"),
    [
        ("n_heads_in_group", {}, NONE),
        ("n_heads_in_group", {"n_heads_in_group": 4}, NONE),
        ("no_op", {"no_op": "yes"}, NONE),
        ("num_sink_tokens", {**ATTENTION, "window_length": 7, "num_sink_tokens": 2}, NONE),
        ("mamba", {**ATTENTION, "mamba": {"state_dim": 4}}, NONE),
        ("intermediate_size", ATTENTION, {}),
        ("ffn_mult", ATTENTION, {"ffn_mult": -1.0}),
        ("ffn_mult", ATTENTION, {"ffn_mult": 0.01}),
        ("ffn_mult", ATTENTION, {"ffn_mult": 1e9}),
        ("gated", ATTENTION, {"intermediate_size": 8, "gated": False}),
        ("hidden_act", ATTENTION, {"intermediate_size": 8, "hidden_act": "gelu"}),
        ("moe", ATTENTION, {"moe": {"num_local_experts": 8}}),
    ],
)
def test_a_bad_block_is_named(field: str, attention: dict[str, Any], ffn: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)'{field}'.*config\.json, block_configs\[0\]\.(attention|ffn)"):
        read(attention, ffn)


def test_what_is_no_block_is_named() -> None:
    for blocks, named in (
        ([{"ffn": NONE}], r"'attention'.*block_configs\[0\]"),
        ([{"attention": NONE, "ffn": NONE, "parallel_blocks": [{}]}], r"'parallel_blocks'.*block_configs\[0\]"),
        ([1], "'block_configs'"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){named}"):
            read(NONE, NONE, block_configs=blocks)
