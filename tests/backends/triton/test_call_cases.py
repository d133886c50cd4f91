"""The calls that kernels are tested with are calls that a step can make."""

import pytest
import torch
from call_cases import cases
from one_call import SYMBOLS

from ingot.ir.ops import OPS

OVER_SEQUENCES = sorted(op for op, symbols in SYMBOLS.items() if {"q_starts", "q_lens"} <= set(symbols))


@pytest.mark.parametrize("op", OVER_SEQUENCES)
def test_no_token_belongs_to_two_sequences(op: str) -> None:
    """Two programs would write its row, and the last one wins."""
    for number, call in enumerate(cases(op, torch.float32)):
        given = OPS[op].bind(call.args, dict(call.kwargs))
        spans = zip(given["q_starts"].tolist(), given["q_lens"].tolist(), strict=True)
        owned = [token for start, count in spans for token in range(start, start + count)]
        assert len(owned) == len(set(owned)), f"call {number}: {given['q_starts']}, {given['q_lens']}"
