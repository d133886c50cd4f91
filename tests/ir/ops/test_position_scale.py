"""Queries scaled by position against the factors of transformers' Llama 4 and Mistral 4."""

import pytest
import torch
from op_values import F32, FLOATS, check, generator, randn
from transformers.models.mistral4.modeling_mistral4 import get_llama_4_attn_scale

from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS

OP = OPS["scale_by_position"]
# Both sides of a period's end, and contexts of published models.
POSITIONS = torch.tensor([0, 1, 8190, 8191, 8192, 16_383, 16_384, 131_071, 1_048_575], dtype=torch.int32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("strength", [0.1, 1.7])
def test_mistral_4(strength: float, dtype: torch.dtype) -> None:
    x = randn(generator(3), dtype, len(POSITIONS), 3, 8)
    factors = get_llama_4_attn_scale(POSITIONS[None].double(), strength, 8192)[0].view(-1, 1, 1)
    expected = (x.double() * factors.double()).to(dtype)
    check(OP.reference(x, POSITIONS, period=8192, strength=strength), expected, dtype, 4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_llama_4_counts_the_token_itself(dtype: torch.dtype) -> None:
    """Transformers, modeling_llama4.py: log1p(floor((position + 1) / floor_scale)) * attn_scale + 1."""
    x = randn(generator(3), dtype, len(POSITIONS), 3, 8)
    periods = [0, 0, 0, 1, 1, 2, 2, 16, 128]
    factors = (torch.log(torch.tensor(periods).double() + 1) * 0.3 + 1).view(-1, 1, 1)
    expected = (x.double() * factors).to(dtype)
    check(OP.reference(x, POSITIONS, period=8192, strength=0.3, shift=1), expected, dtype, 4)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"period": 0}, "period 0 and shift 0"),
        ({"shift": -1}, "period 16 and shift -1"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions torch.int32 \[3\]"),
        ({"positions": torch.zeros(9)}, "positions torch.float32"),
    ],
)
def test_refuses(changes: dict[str, object], what: str) -> None:
    with pytest.raises(VerifyError, match=what):
        OP.reference(
            randn(generator(3), F32, 9, 4), **{"positions": POSITIONS, "period": 16, "strength": 0.1, **changes}
        )
