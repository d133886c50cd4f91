"""Solar's skips, as its four lists of layers say them."""

from typing import Any

from tiny import TINY

from ingot.models.architectures import read_spec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.skips import SkipSpec


def dims(**changes: Any) -> Any:
    config = {key: value for key, value in {**TINY["solar-skips"].config, **changes}.items() if value is not ...}
    return read_spec(config).dims


def test_the_stream_that_was_kept_last_is_mixed_in() -> None:
    assert dims().skips == (SkipSpec(1, 2, 0.7), SkipSpec(2, 4, 0.7), SkipSpec(3, 5, 0.7))
    both = dims(bskcn_1=[0, 2], bskcn_2=[1], bskcn_3=[2, 4], bskcn_4=[4])
    assert both.skips == (SkipSpec(2, 2, 0.7), SkipSpec(2, 4, 0.7), SkipSpec(1, 4, 0.7))
    assert dims(**{f"bskcn_{place}": [] for place in (1, 2, 3, 4)}).skips == ()


def test_what_the_published_model_has_is_the_default() -> None:
    """Of 64 layers; the window is Phi-3's, which the model grew from."""
    bare = dims(num_hidden_layers=64, sliding_window=..., **dict.fromkeys([*BSKCN, "bskcn_tv"], ...))
    pairs = [(12, 16), (20, 24), (20, 28), (32, 36), (32, 40), (44, 48)]
    assert [(skip.start, skip.to) for skip in bare.skips] == pairs
    assert {skip.weight for skip in bare.skips} == {0.8}
    attentions = [branch.block for layer in bare.layers for branch in layer.branches if branch.name == "attention"]
    assert {one.window for one in attentions if isinstance(one, AttentionSpec)} == {2047}


BSKCN = tuple(f"bskcn_{place}" for place in (1, 2, 3, 4))
