"""linear by Triton kernels: one token, and a tile of tokens, against the op's reference."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from triton_schedules import DEVICE, TESTED, new_schedule, run_lowering, run_schedule, some

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.linear.call import Linear
from ingot.backends.triton.lower.linear.matmul import LOWERINGS, schedule_linear
from ingot.backends.triton.lower.linear.tiles import Tiles
from ingot.backends.triton.lower.linear.weight import plain_weight
from ingot.backends.triton.lower.sizes import padded_tokens
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir import ops
from ingot.ir.artifact.tuning import Choice
from ingot.ir.numerics.tolerances import compare
from ingot.ir.types import TensorType

BUCKETS = ((1, 1), (2, 16), (17, 32), (33, 64))


def _check(args: tuple[Any, ...], dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    (found,) = run_lowering(ops.linear, LOWERINGS["linear"], args, {}, tokens=tokens, dims={"T": args[0].shape[0]})
    expected = ops.linear.reference(*(argument.double() for argument in args))
    assert (problem := compare(found, expected, dtype)) is None, problem


def _drawn(dtype: torch.dtype, seed: int, rows: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """x, weight and bias of a product whose results are of size one."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, k, generator=generator), torch.randn(n, k, generator=generator) * k**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(n, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("tokens", BUCKETS)
def test_samples(dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    for sample in ops.linear.samples(torch.Generator().manual_seed(3), dtype):
        _check(sample.args, dtype, tokens)


# Columns and depths that are no multiples of a tile, deeper than one, and smaller than the smallest. Of the second, so
# deep and narrow, the columns are split among programs.
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    some(6, [(rows, n, k) for rows in (1, 2, 13, 17, 64) for n, k in ((37, 101), (130, 2200), (3, 8), (257, 64))]),
)
def test_odd_shapes(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    tokens = next(bounds for bounds in BUCKETS if rows <= bounds[1])
    _check(_drawn(dtype, rows, rows, n, k), dtype, tokens)


@pytest.mark.parametrize("dtype", TESTED)
def test_splits_are_added_in_one_order(dtype: torch.dtype) -> None:
    """Twice the same bits, whoever arrives last; more splits than the depth has blocks for give zeros of their own."""
    x, weight, _ = (tensor.to(DEVICE) for tensor in _drawn(dtype, 5, 9, 70, 200))
    for splits in (2, 5, 9):
        found = []
        for _ in range(2):
            schedule = new_schedule((2, 16))
            linear = Linear(_input(x, 0), plain_weight(_input(weight, 1)), None, TensorType(dtype, ("T", 70)))
            _give(schedule, linear, Tiles(64, 32, splits, warps=4, stages=2))
            result = schedule_linear(linear, schedule)
            assert [buffer.kind for buffer in schedule.buffers.values()] == ["output", "scratch", "counter"]
            found += run_schedule(schedule, [result], [x, weight], {"T": 9})
        assert torch.equal(*found)
        assert (problem := compare(found[0], x.double() @ weight.double().T, dtype)) is None, problem


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("rows", [1, 7])
def test_strided_rows(dtype: torch.dtype, rows: int) -> None:
    """x and the weight may be parts of the columns of wider matrices."""
    x, weight, _ = (tensor.to(DEVICE) for tensor in _drawn(dtype, 6, rows, 40, 96))
    x, weight = x[:, 16:80], weight[:, 32:96]
    schedule = new_schedule((1, 1) if rows == 1 else (2, 16))
    # One row has the strides of a dense one to torch: the type says what the memory is like.
    given = Value(TensorType(dtype, ("T", 64), (96, 1)), input=0)
    linear = Linear(given, plain_weight(_input(weight, 1)), None, TensorType(dtype, ("T", 40)))
    (found,) = run_schedule(schedule, [schedule_linear(linear, schedule)], [x, weight], {"T": rows})
    assert (problem := compare(found, x.double() @ weight.double().T, dtype)) is None, problem


def _give(schedule: Schedule, linear: Linear, tiles: Tiles) -> None:
    """Have the product get these tile sizes, as a tuning log would."""
    problem = linear.problem(padded_tokens(schedule.bucket.tokens[1])).fields()
    choice = Choice(kernel="linear", problem=problem, tiles=asdict(tiles), source="given")
    schedule.given = {choice.key: choice}


def _input(tensor: torch.Tensor, place: int) -> Value:
    shape = ("T" if place == 0 else tensor.shape[0], tensor.shape[1])
    return Value(TensorType(tensor.dtype, shape, tuple(tensor.stride())), input=place)


def _refusal(x: TensorType, weight: TensorType, tokens: tuple[int, int]) -> str:
    values = {"x": Value(x, input=0), "weight": Value(weight, input=1), "bias": None}
    with pytest.raises(Refused) as refused:
        call = Call("linear", values, {}, (TensorType(x.dtype, (x.shape[0], weight.shape[0])),))
        LOWERINGS["linear"](call, new_schedule(tokens))
    return str(refused.value)


def test_refusals() -> None:
    half, wide = torch.bfloat16, torch.float64
    weight = TensorType(half, (8, 16))
    assert "many tokens" in _refusal(TensorType(half, ("T", 16)), weight, (65, 8192))
    assert "many tokens" in _refusal(TensorType(half, (100, 16)), weight, (1, 1))
    assert "'E' rows" in _refusal(TensorType(half, ("E", 16)), weight, (1, 1))
    assert "f64[8, 16]" in _refusal(TensorType(wide, ("T", 16)), TensorType(wide, (8, 16)), (1, 1))
    assert "a matmul of f32 and bf16[8, 16]" in _refusal(TensorType(torch.float32, ("T", 16)), weight, (1, 1))
    assert "strided along its last axis" in _refusal(TensorType(half, ("T", 16), (32, 2)), weight, (1, 1))
