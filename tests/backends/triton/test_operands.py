"""Operand loaders: the registry, and a weight of two parts, bytes and a scale for each row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton_schedules import DEVICE, TESTED, new_schedule, run_schedule

from ingot.backends.triton import operands
from ingot.backends.triton.compile import launch_key
from ingot.backends.triton.emit import Triton
from ingot.backends.triton.kernels.linear.operand_plain import fetch_plain
from ingot.backends.triton.lower.call import Refused
from ingot.backends.triton.lower.linear.call import Linear
from ingot.backends.triton.lower.linear.matmul import schedule_linear
from ingot.backends.triton.lower.linear.weight import Weight, plain_weight
from ingot.backends.triton.operands import Loader, register_loader
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.numerics.tolerances import compare
from ingot.ir.types import TensorType

N, K = 70, 136


@triton.jit
def _begin(weight, row, STORED: tl.constexpr):
    return weight[0] + row * STORED, weight[1] + row


@triton.jit
def _within(local, k, STORED: tl.constexpr):
    return local[:, None] * STORED + k[None, :], local


@triton.jit
def _load(
    begin, within, start, k, n, N: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr, WHOLE: tl.constexpr,
    EVICTION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    inside = (n < N)[:, None] & (start + k < K)[None, :]
    elements = tl.load(begin[0] + within[0] + start, mask=inside, other=0, eviction_policy=EVICTION)
    scales = tl.load(begin[1] + within[1], mask=n < N, other=0.0)
    return (elements.to(tl.float32) * scales[:, None]).to(DTYPE)


@triton.jit
def _fetch(weight, rows, start, K: tl.constexpr, STORED: tl.constexpr, LINES: tl.constexpr):
    fetch_plain(weight[0], rows, start, K, STORED, LINES)


SCALED = Loader("bytes", _begin, _within, _load, _fetch, lambda weight, dtype: weight.parts[0].strides[0])


@pytest.fixture
def scaled() -> Iterator[None]:
    register_loader(SCALED)
    yield
    del operands.LOADERS["bytes"]


def _product(dtype: torch.dtype, rows: int, weight: Weight) -> tuple[Schedule, Value]:
    schedule = new_schedule((1, 1) if rows == 1 else (2, 16))
    x = Value(TensorType(dtype, ("T", K)), input=0)
    return schedule, schedule_linear(Linear(x, weight, None, TensorType(dtype, ("T", N))), schedule)


def _bytes(rows: int = N) -> Weight:
    parts = TensorType(torch.int8, (rows, K)), TensorType(torch.float32, (rows,))
    return Weight(tuple(Value(part, input=1 + place) for place, part in enumerate(parts)), rows, K, "bytes")


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("dtype", TESTED, ids=str)
@pytest.mark.parametrize("rows", [1, 13])
def test_a_weight_of_two_parts(rows: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, K, generator=g).to(dtype)
    elements = torch.randint(-127, 128, (N, K), generator=g, dtype=torch.int8)
    # Powers of two: products of elements and scales are exact in every dtype.
    scales = 2.0 ** torch.randint(-11, -8, (N,), generator=g)
    schedule, result = _product(dtype, rows, _bytes())
    inputs = [tensor.to(DEVICE) for tensor in (x, elements, scales)]
    (found,) = run_schedule(schedule, [result], inputs, {"T": rows})
    expected = x.double() @ (elements.double() * scales.double()[:, None]).T
    assert (problem := compare(found, expected, dtype)) is None, problem


@pytest.mark.usefixtures("scaled")
def test_a_packing_has_machine_code_and_tiles_of_its_own() -> None:
    plain = plain_weight(Value(TensorType(torch.float32, (N, K)), input=1))
    both = [_product(torch.float32, 1, weight)[0] for weight in (plain, _bytes())]
    assert launch_key(both[0].launches[0]) != launch_key(both[1].launches[0])
    choices = [schedule.choices[0] for schedule in both]
    assert choices[0].key != choices[1].key
    assert [Triton().measures(choice) for choice in choices] == [True, False]
    assert [value.input for value in both[1].launches[0].values] == [0, 1, 2, None]


def test_refusals() -> None:
    with pytest.raises(Refused, match="no loader for the packing 'bytes'; there are plain"):
        _product(torch.float32, 1, _bytes())
    with pytest.raises(ValueError, match="packing 'plain' already has a loader"):
        register_loader(operands.LOADERS["plain"])
    with pytest.raises(Refused, match="a weight of f32"):
        plain_weight(Value(TensorType(torch.float32, ("T", K)), input=1))
