"""Rotary tables and their use against transformers' own."""

from typing import Any

import pytest
import torch
from op_values import F32, F64, FLOATS, check, generator, ints, randn, rope_attrs
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ingot.ir.errors import ConfigError
from ingot.ir.ops import OPS
from ingot.ir.tables import ROPE_TYPES, make_table

ROPE_CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


def llama_config(case: dict[str, Any], head_dim: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **case},
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: str(case["rope_type"]))
def test_rope_tables_are_transformers(case: dict[str, Any], head_dim: int, theta: float) -> None:
    config = llama_config(case, head_dim, theta)
    if case["rope_type"] == "default":
        frequencies, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[case["rope_type"]](config)
    assert scaling == 1.0
    attrs = rope_attrs(case, head_dim, theta, 4096)
    ours = ROPE_TYPES[case["rope_type"]](attrs)
    assert ours.dtype == frequencies.dtype == F32
    if case["rope_type"] == "llama3":  # the same formula in another order
        torch.testing.assert_close(ours, frequencies, rtol=2**-22, atol=0)
    else:
        assert torch.equal(ours, frequencies)

    table = make_table(attrs)
    assert table.shape == (4096, head_dim) and table.dtype == F32 and table.is_contiguous()
    positions = torch.arange(4096)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    theirs = torch.cat([cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]], 1)
    if torch.equal(ours, frequencies):
        assert torch.equal(table, theirs)
    else:  # an angle is off by what its frequency is off
        angles = torch.outer(positions.float(), ours)
        assert bool(((table - theirs).abs() <= torch.cat([angles, angles], 1) * 2**-21 + 2**-23).all())
    assert torch.equal(table[0, : head_dim // 2], torch.ones(head_dim // 2))


def test_attention_factor_scales_cosines_and_sines() -> None:
    attrs = rope_attrs({"rope_type": "default"}, 8, 1e4, 50)
    assert torch.equal(make_table({**attrs, "attention_factor": 1.25}), make_table(attrs) * 1.25)


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown table 'rope' / 'yarm'"):
        make_table(rope_attrs({"rope_type": "yarm"}, 8, 1e4, 4))
    with pytest.raises(ConfigError, match="unknown table 'sinusoids'"):
        make_table({"kind": "sinusoids"})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary", [16, 12, 2])
def test_rope_is_transformers(dtype: torch.dtype, rotary: int) -> None:
    """With the table's own angles, in float64; the rest of each head stays as it is, to the bit."""
    g = generator(5)
    x, positions = randn(g, dtype, 7, 3, 16), ints(0, 1, 63, 17, 17, 5, 40)
    table = make_table(rope_attrs({"rope_type": "default"}, rotary, 1e4, 64))
    cos, sin = (part.repeat(1, 2)[positions.long()][None].double() for part in table.chunk(2, 1))
    turned, _ = apply_rotary_pos_emb(x[None, ..., :rotary].double(), x[None, ..., :rotary].double(), cos, sin, 2)
    found = OPS["rope"].reference(x, positions, table)
    check(found[..., :rotary], turned[0], dtype)
    assert torch.equal(found[..., rotary:], x[..., rotary:])


@pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: str(case["rope_type"]))
def test_rope_is_llamas(case: dict[str, Any]) -> None:
    g = generator(6)
    q, k, positions = randn(g, F32, 9, 4, 64), randn(g, F32, 9, 2, 64), torch.randint(0, 512, (9,), generator=g)
    cos, sin = LlamaRotaryEmbedding(llama_config(case, 64, 1e4))(q, positions[None])
    table = make_table(rope_attrs(case, 64, 1e4, 512))
    for x in (q, k):
        theirs = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0]
        check(OPS["rope"].reference(x, positions.int(), table), theirs, F32, 5)  # angles differ by ulps at position 511


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary", [16, 12, 2])
def test_interleaved_rope_is_coheres(dtype: torch.dtype, rotary: int) -> None:
    """Cohere turns 2i against 2i + 1, in float32; the rest of each head stays as it is."""
    g = generator(26)
    x, positions = randn(g, dtype, 7, 3, 16), ints(0, 1, 63, 17, 17, 5, 40)
    table = make_table(rope_attrs({"rope_type": "default"}, rotary, 1e4, 64))
    cos, sin = (part.repeat_interleave(2, 1)[positions.long()][None] for part in table.chunk(2, 1))
    turned, _ = cohere.apply_rotary_pos_emb(x[None, ..., :rotary], x[None, ..., :rotary], cos, sin, unsqueeze_dim=2)
    found = OPS["rope"].reference(x, positions, table, interleaved=True)
    if dtype == F64:  # theirs is float32 whatever it is given
        check(found[..., :rotary].float(), turned[0], F32)
    else:
        check(found[..., :rotary], turned[0], dtype)
    assert torch.equal(found[..., rotary:], x[..., rotary:])
    # The same turn as in NeoX order with the elements of a head sorted: evens, then odds.
    order = torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2), torch.arange(rotary, 16)])
    assert torch.equal(found[..., order], OPS["rope"].reference(x[..., order], positions, table))
