"""MPT's fields of attention, which stand in an object of their own."""

from typing import Any

from tiny import TINY

from ingot.models.architectures import read_spec
from ingot.models.blocks.alibi import AlibiSpec
from ingot.models.blocks.attention import AttentionSpec


def attention(**fields: Any) -> AttentionSpec:
    dims = read_spec({**TINY["mpt-plain"].config, "attn_config": fields}).dims
    (found,) = {branch.block for layer in dims.layers for branch in layer.branches if branch.name == "attention"}
    assert isinstance(found, AttentionSpec)
    return found


def test_slopes_end_where_the_config_says() -> None:
    """Transformers takes the field and does not hand it on; in the code of the checkpoints it counts."""
    assert attention(alibi=True, alibi_bias_max=16).alibi == AlibiSpec(flattest=16.0)
    assert attention().alibi == attention(alibi_bias_max=None).alibi == AlibiSpec(flattest=8.0)


def test_what_is_none_is_at_its_default() -> None:
    assert attention(clip_qkv=None, softmax_scale=None, alibi=None, attn_type=None) == attention()
    assert attention(clip_qkv=6, softmax_scale=0.5).clip == 6.0


def test_the_context_is_what_the_config_says() -> None:
    assert read_spec({**TINY["mpt-plain"].config, "max_seq_len": 77}).max_position == 77
