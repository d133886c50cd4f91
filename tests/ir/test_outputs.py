"""An output is what it is declared to be; logits may be as narrow as their numbers."""

import pytest

from ingot.ir.outputs import may_stand_for
from ingot.ir.parse import parse_type


@pytest.mark.parametrize(
    ("output", "given", "declared", "may"),
    [
        ("logits", "bf16[L, 9]", "f32[L, 9]", True),
        ("logits", "f32[L, 9]", "f32[L, 9]", True),
        ("logits", "f32[L, 9]", "bf16[L, 9]", False),
        ("logits", "bf16[L, 8]", "f32[L, 9]", False),
        ("logprobs", "f32[L, 9]", "f32[L, 9]", True),
        ("logprobs", "bf16[L, 9]", "f32[L, 9]", False),
    ],
)
def test_which_type_may_stand_for_another(output: str, given: str, declared: str, may: bool) -> None:
    assert may_stand_for(parse_type(given), parse_type(declared), output) is may
