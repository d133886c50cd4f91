"""Judges what a kernel gave for the experts of a mixture.

The op rounds the result of each matmul to x's dtype. A kernel rounds only what it stores: the joined rows, and the sum.
It may err as much as a reference with either rounding does: where the format of down rounds its input to eight bits,
the two joined rows can lie on different sides of a tie, which is a far larger step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from call_oracle import rounded_worse
from one_call import OneCall

from ingot.ir import ops
from ingot.ir.ops.experts import run_experts


def experts_difference(
    args: Sequence[Any], kwargs: Mapping[str, Any], found: torch.Tensor, residual: torch.Tensor | None = None
) -> str | None:
    """How `found` [T, D], on the host, is wrong as the result of `ops.experts(*args, **kwargs)`, or None.

    `residual` [T, D] is added to the result. A kernel need not round the result before that.
    """
    call = OneCall("experts", tuple(args), kwargs)
    (reference,), (exact,) = call.reference(), call.reference(exact=True)
    if residual is not None:
        reference, exact = reference + residual, exact + residual.double()
    if found.dtype != reference.dtype or found.shape != reference.shape:
        return f"{found.dtype}{list(found.shape)}, expected {reference.dtype}{list(reference.shape)}"
    if rounded_worse(found, reference, exact) is None:
        return None
    return rounded_worse(found, _rounded_when_stored(args, kwargs, residual), exact)


def _rounded_when_stored(args: Sequence[Any], kwargs: Mapping[str, Any], residual: torch.Tensor | None) -> torch.Tensor:
    """The result in float32, with the joined rows and the sum rounded to x's dtype."""
    dtype = args[0].dtype
    wide = tuple(one.float() if isinstance(one, torch.Tensor) and one.dtype == dtype else one for one in args)
    made = run_experts(ops.experts.bind(wide, dict(kwargs)), stored=dtype)
    return (made if residual is None else made + residual.float()).to(dtype)
