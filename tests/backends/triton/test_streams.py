"""Ops of several streams and of sparse activations by Triton kernels against their references."""

import pytest
import torch
from call_cases import cases
from odd_samples import odd_samples
from triton_checks import check_lowering
from triton_schedules import TESTED, new_schedule

from ingot.backends.triton.lower import sparsity, streams
from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.schedule import Value
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

LOWERINGS = {**streams.LOWERINGS, **sparsity.LOWERINGS}


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", LOWERINGS)
def test_samples(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), dtype) + odd_samples(name, dtype):
        check_lowering(op, LOWERINGS[name], sample.args, sample.kwargs, dims={"T": sample.args[0].shape[0]})


@pytest.mark.parametrize("name", LOWERINGS)
def test_sizes_of_models(name: str) -> None:
    """One token and 13; the others run on a GPU."""
    for call in cases(name, torch.bfloat16)[-5:-3]:
        check_lowering(OPS[name], LOWERINGS[name], call.args, call.kwargs, dims={"T": call.args[0].shape[0]})


F32 = torch.float32


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("mix", {"x": TensorType(F32, ("T", 2, 8), (32, 16, 2)), "weights": TensorType(F32, ("T", 2, 2))}, "strided"),
        (
            "concat",
            {"x": TensorType(F32, ("T", 2, 8)), "y": TensorType(torch.bfloat16, ("T", 2, 8))},
            "differ in dtype",
        ),
        ("match_rms", {"x": TensorType(F32, ("T", 1 << 16)), "like": TensorType(F32, ("T", 1 << 16))}, "wider than"),
        ("gaussian_top_k", {"x": TensorType(F32, ("T", 1 << 16))}, "wider than"),
        ("gaussian_top_k", {"x": TensorType(F32, ("T", 2, 8))}, r"not \[T, F\]"),
    ],
)
def test_refuses(name: str, values: dict[str, TensorType], reason: str) -> None:
    attributes = {"dim": 1, "least": 1e-5, "deviations": 1.0}
    given = {key: Value(one, place) for place, (key, one) in enumerate(values.items())}
    with pytest.raises(Refused, match=reason):
        LOWERINGS[name](Call(name, given, attributes, (values["x"],)), new_schedule())
