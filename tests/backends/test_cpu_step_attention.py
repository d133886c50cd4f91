"""Attention within a step by the cpu backend, against float64; tokens of no sequence hold NaN."""

from typing import Any

import pytest
import torch

from ingot.backends.cpu.calls.step_attention import step_attention_ops
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS

STARTS, LENS, TOKENS = [2, 35, 35, 37], [33, 0, 1, 20], 60
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"mask": "bidirectional"},
    "causal": {},
    "a window": {"mask": "window_7"},
    "blocks": {"mask": "block_causal_8"},
    "capped, with sinks": {"mask": "bidirectional", "soft_cap": 2.0},
    "with slopes": {},
    "all, with sinks and slopes": {"mask": "bidirectional"},
}


def arguments(dtype: torch.dtype, *, sinks: bool, slopes: bool) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """(the arguments, which rows some sequence owns): q, k and v are parts of one product."""
    g = torch.Generator().manual_seed(4)
    owned = torch.zeros(TOKENS, dtype=torch.bool)
    for start, count in zip(STARTS, LENS, strict=True):
        owned[start : start + count] = True
    merged = torch.randn(TOKENS, 8, 24, generator=g).to(dtype)
    merged[~owned] = float("nan")
    ints = [torch.tensor(one, dtype=torch.int32) for one in (STARTS, LENS)]
    q, k, v = merged.split([4, 2, 2], 1)
    last = [torch.randn(4, generator=g).to(dtype) if sinks else None, torch.linspace(0.5, 0.1, 4) if slopes else None]
    return [q, k, v, *ints, *last], owned


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_float64(case: str, dtype: torch.dtype) -> None:
    args, owned = arguments(dtype, sinks="sinks" in case, slopes="slopes" in case)
    options = {"scale": 0.2, **OPTIONS[case]}
    found = step_attention_ops()["ingot.step_attention"](*args, **options)
    exact = OPS["step_attention"].reference(
        *(one.double() if one is not None and one.is_floating_point() else one for one in args), **options
    )
    assert found.dtype == dtype and found.is_contiguous() and not found[~owned].any()
    # torch rounds weights of a softmax to the dtype of the values.
    problem = compare(found, exact, dtype, factor=2.0)
    assert problem is None, problem
