"""Calls that the kernels of a step's ends have nothing for are refused, with the reason."""

import pytest
import torch
from triton_schedules import new_schedule

from ingot.backends.triton.lower import gate, step
from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.sampling import logprobs, penalties
from ingot.backends.triton.lower.sampling import sample as sampling
from ingot.backends.triton.schedule import Value
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

_LOWERINGS = {
    **gate.LOWERINGS,
    **logprobs.LOWERINGS,
    **penalties.LOWERINGS,
    **sampling.LOWERINGS,
    **step.LOWERINGS,
}
F32, I32 = torch.float32, torch.int32


@pytest.mark.parametrize(
    ("name", "first", "rest", "reason"),
    [
        ("sample", TensorType(I32, ("L", 64)), TensorType(I32, ("L", 4)), "logits are not f32, bf16 or f16: i32"),
        ("top_logprobs", TensorType(I32, ("L", 64)), TensorType(I32, ("L",)), "logits are not f32, bf16 or f16: i32"),
        ("sample", TensorType(F32, ("L", 64), (128, 2)), TensorType(I32, ("L",)), "logits is strided along its last"),
        ("select_rows", TensorType(F32, ("T", 4, 8), (64, 16, 1)), TensorType(I32, ("L",)), "that are not contiguous"),
        ("select_rows", TensorType(F32, ("T", 8)), TensorType(F32, ("L",)), "not a dense vector of i32 or i64: f32"),
        ("silu_mul", TensorType(F32, ("T", 8)), TensorType(F32, ("T", 9)), "gate and up are not both"),
        ("silu_mul", TensorType(F32, ("T", 2, 8)), TensorType(F32, ("T", 2, 8)), "gate and up are not both"),
    ],
)
def test_refused(name: str, first: TensorType, rest: TensorType, reason: str) -> None:
    first_name, *others = OPS[name].parameters.names
    values = {other: Value(rest, input=place + 1) for place, other in enumerate(others)}
    values[first_name] = Value(first, input=0)
    with pytest.raises(Refused, match=reason):
        _LOWERINGS[name](Call(name, values, {}, (TensorType(first.dtype, first.shape),)), new_schedule())
