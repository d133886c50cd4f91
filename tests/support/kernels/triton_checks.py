"""Holds lowerings of the triton backend against the references of their ops."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton_schedules import run_lowering

from ingot.backends.triton.lower.call import Lowering
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import Op


def check_lowering(
    op: Op,
    lowering: Lowering,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    tokens: tuple[int, int] = (1, 64),
    dims: Mapping[str, int] | None = None,
    factor: float = 1.0,
) -> None:
    """Every result of a call, states among them, agrees with the reference's on the CPU: each within the tolerance of
    its own dtype."""
    expected = op.reference(*args, **kwargs)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    found = run_lowering(op, lowering, args, kwargs, tokens=tokens, dims=dims)
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype
        problem = compare(one, other, other.dtype, factor=factor)
        assert problem is None, f"result {index} of {op.name}: {problem}"
