"""Rotary tables against transformers' own functions, on both sides of every switch."""

import math
from typing import Any

import pytest
import torch
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.mpt import modeling_mpt as mpt

from ingot.ir.errors import ConfigError
from ingot.ir.tables import make_table
from ingot.models.config import ConfigReader

HEAD_DIM, ORIGINAL = 16, 48
_LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Name: rope_parameters, other fields, positions of the table.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, {}, 100),
    "linear": ({"rope_type": "linear", "factor": 2.5}, {}, 100),
    "dynamic, shorter": ({"rope_type": "dynamic", "factor": 3.0}, {"max_position_embeddings": ORIGINAL}, ORIGINAL - 1),
    "dynamic, at the original": (
        {"rope_type": "dynamic", "factor": 3.0},
        {"max_position_embeddings": ORIGINAL},
        ORIGINAL,
    ),
    "dynamic, beyond": ({"rope_type": "dynamic", "factor": 3.0}, {"max_position_embeddings": ORIGINAL}, 3 * ORIGINAL),
    "llama3": ({**_LLAMA3, "original_max_position_embeddings": 64}, {}, 100),
    "llama3, long original": ({**_LLAMA3, "original_max_position_embeddings": 8192}, {}, 100),
    "llama3, equal limits": (
        {**_LLAMA3, "high_freq_factor": 1.0, "original_max_position_embeddings": 64},
        {},
        100,
    ),
    "llama3, original not given": (_LLAMA3, {"max_position_embeddings": 96}, 100),
    "yarn": (_YARN, {}, 100),
    "yarn, both mscales": ({**_YARN, "mscale": 1.3, "mscale_all_dim": 0.4}, {}, 100),
    "yarn, one mscale": ({**_YARN, "mscale": 1.3}, {}, 100),
    "yarn, attention_factor": ({**_YARN, "attention_factor": 1.7, "mscale": 1.3, "mscale_all_dim": 0.4}, {}, 100),
    "yarn, betas": ({**_YARN, "beta_fast": 5.0, "beta_slow": 0.3}, {}, 100),
    "yarn, not truncated": ({**_YARN, "truncate": False}, {}, 100),
    "yarn, no width": ({**_YARN, "original_max_position_embeddings": 4}, {}, 100),
    "yarn, factor below 1": ({**_YARN, "factor": 0.5}, {}, 100),
    "yarn, factor from the maxima": ({**_YARN, "factor": None}, {"max_position_embeddings": 5 * ORIGINAL}, 100),
    "longrope, at the original": (_LONG, {"max_position_embeddings": 4 * ORIGINAL}, ORIGINAL),
    "longrope, one beyond": (_LONG, {"max_position_embeddings": 4 * ORIGINAL}, ORIGINAL + 1),
    "longrope, factor": ({**_LONG, "factor": 9.0}, {"max_position_embeddings": 4 * ORIGINAL}, 100),
    "longrope, attention_factor": ({**_LONG, "attention_factor": 1.4}, {}, 100),
    "longrope, not stretched": (_LONG, {"max_position_embeddings": ORIGINAL}, 40),
    "partial": ({**_YARN, "partial_rotary_factor": 0.5}, {}, 100),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("theta", [503.0, 1e6])
def test_table_agrees_with_transformers(case: str, theta: float) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters, fields, positions = CASES[case]
    parameters = {**parameters, "rope_theta": theta}
    fields = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": 192, **fields}
    theirs = transformers.LlamaConfig(**fields, rope_parameters=dict(parameters))
    if parameters["rope_type"] == "default":
        frequencies, scale = theta ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, seq_len=positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies.double())
    expected = torch.cat([angles.cos(), angles.sin()], -1) * scale

    rope = ConfigReader({**fields, "rope_parameters": parameters}).rope(HEAD_DIM)
    found = make_table(
        {
            "kind": "rope",
            "rope_type": rope.rope_type,
            "positions": positions,
            "theta": rope.theta,
            "rotary_dim": rope.rotary_dim,
            **dict(rope.constants),
        }
    )
    assert found.dtype == torch.float32 and found.shape == expected.shape
    # Frequencies of the two differ by float32's rounding, an angle by that times its position.
    assert float((found - expected).abs().max()) <= positions * 4 * torch.finfo(torch.float32).eps * max(scale, 1.0)


def test_sides_of_a_switch_differ() -> None:
    """So that agreement above on both sides says something."""
    for kind, parameters in (("dynamic", {"rope_type": "dynamic", "factor": 3.0}), ("longrope", _LONG)):
        fields = {"max_position_embeddings": ORIGINAL, "rope_parameters": {**parameters, "rope_theta": 503.0}}
        rope = ConfigReader(fields).rope(HEAD_DIM)
        constants = {"theta": rope.theta, "rotary_dim": HEAD_DIM, **dict(rope.constants)}
        shorter, longer = (
            make_table({"kind": "rope", "rope_type": kind, "positions": positions, **constants})
            for positions in (ORIGINAL, 3 * ORIGINAL)
        )
        assert float((shorter - longer[:ORIGINAL]).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {**_YARN, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {**_YARN, "truncate": 1}}, "truncate"),
        ({"rope_scaling": {**_YARN, "original_max_position_embeddings": "long"}}, "original_max_position_embeddings"),
        ({"rope_scaling": _YARN, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_scaling": {**_LONG, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {**_LONG, "long_factor": [math.nan] * 8}}, "long_factor"),
        ({"rope_scaling": {**_LONG, "long_factor": [math.inf] * 8}}, "long_factor"),
        ({"rope_scaling": {**_LONG, "long_factor": [True] * 8}}, "long_factor"),
        ({"rope_scaling": {**_LONG, "long_factor": None}}, "long_factor"),
        (
            {"rope_scaling": {**_LONG, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {**_LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ({"rope_scaling": [4.0]}, "rope_scaling"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        ConfigReader({"max_position_embeddings": 192, **fields}).rope(HEAD_DIM)


@pytest.mark.parametrize("heads", [*range(1, 34), 71, 112])
def test_slopes_are_blooms_and_mpts(heads: int) -> None:
    """Transformers' functions, whose powers are rounded to float32 one by one."""
    made = make_table({"kind": "alibi", "heads": heads, "flattest": 8.0, "factor": 1.0})
    assert made.dtype is torch.float32 and made.shape == (heads,)
    torch.testing.assert_close(made, bloom._get_alibi_slopes(heads, torch.device("cpu")), rtol=1e-5, atol=0)
    for most in (1, 5, 8, 16):
        made = make_table({"kind": "alibi", "heads": heads, "flattest": float(most), "factor": 0.25})
        theirs = -mpt.build_mpt_alibi_tensor(heads, 2, most)[:, 0, 0]  # of a key one position before its query
        torch.testing.assert_close(made, theirs * 0.25, rtol=1e-5, atol=0)
