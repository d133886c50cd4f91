"""A packing of its own for weights: tiles of 16 by 16 elements, one after the other. Its loader is all that is added.

Without a GPU the interpreter runs the products in float32, and the compiler makes their machine code for sm_90.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from sm_90 import run_without_interpreter
from triton_schedules import DEVICE, new_schedule, run_schedule

from ingot.backends.triton.compile import compile_kernel
from ingot.backends.triton.lower.call import Refused
from ingot.backends.triton.lower.linear.call import Gate, Linear
from ingot.backends.triton.lower.linear.matmul import schedule_linear
from ingot.backends.triton.lower.linear.weight import Weight
from ingot.backends.triton.lower.sizes import padded_tokens
from ingot.backends.triton.operands import LOADERS, Loader, register_loader
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.numerics.tolerances import compare
from ingot.ir.types import TensorType

TILE = 16


@triton.jit
def _begin(weight, row, STORED: tl.constexpr):
    return weight, row


@triton.jit
def _within(local, k, STORED: tl.constexpr):
    return local


@triton.jit
def _at(rows, columns, STORED: tl.constexpr):
    """Where elements lie. STORED is how many tiles cover the columns."""
    return (rows // 16 * STORED + columns // 16) * 256 + rows % 16 * 16 + columns % 16


@triton.jit
def _load(
    begin, within, start, k, n, N: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr, WHOLE: tl.constexpr,
    EVICTION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    weight, row = begin
    inside = (n < N)[:, None] & (start + k < K)[None, :]
    at = weight + _at((row + within)[:, None], (start + k)[None, :], STORED)
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION).to(DTYPE)


@triton.jit
def _fetch(weight, rows, start, K: tl.constexpr, STORED: tl.constexpr, LINES: tl.constexpr):
    """A line is four rows of a tile, so that a tile's worth of columns is one line of each row."""
    columns = tl.minimum(start + tl.arange(0, LINES) * 16, K - 1)
    at = (weight + _at(rows[:, None], columns[None, :], STORED)).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


def _stored(weight: Weight, dtype: torch.dtype) -> int:
    if weight.parts[0].type.dtype != dtype:
        raise Refused(f"tiles of {weight.parts[0].type} in a product of another dtype")
    return -(-weight.depth // TILE)


TILED = Loader("tiled", _begin, _within, _load, _fetch, _stored)


@pytest.fixture(autouse=True)
def packing() -> Iterator[None]:
    register_loader(TILED)
    yield
    del LOADERS["tiled"]


def tiled(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-size // TILE) for size in weight.shape)
    padded = torch.nn.functional.pad(weight, (0, columns * TILE - weight.shape[1], 0, rows * TILE - weight.shape[0]))
    return padded.view(rows, TILE, columns, TILE).transpose(1, 2).contiguous()


def product(
    tokens: int, n: int, k: int, dtype: torch.dtype, gate: bool = False, dependent: bool = False
) -> tuple[Schedule, Value]:
    """A product with a gate or a residual behind it; batch-invariant for many tokens. Inputs: x, weight, residual."""
    rows = 2 * n if gate else n
    stored = Value(TensorType(dtype, (-(-rows // TILE), -(-k // TILE), TILE, TILE)), input=1)
    linear = Linear(
        Value(TensorType(dtype, ("T", k)), input=0),
        Weight((stored,), rows, k, "tiled"),
        None,
        TensorType(dtype, ("T", n)),
        gate=Gate("silu", 0, n) if gate else None,
        residual=None if gate else Value(TensorType(dtype, ("T", n)), input=2),
    )
    schedule = new_schedule((1, padded_tokens(tokens)), invariant=tokens > 64)
    schedule.dependent = dependent
    return schedule, schedule_linear(linear, schedule)


def check(tokens: int, n: int, k: int, dtype: torch.dtype, gate: bool) -> None:
    g = torch.Generator().manual_seed(n)
    weight = (torch.randn(2 * n if gate else n, k, generator=g) * k**-0.5).to(dtype)
    x, residual = (torch.randn(tokens, size, generator=g).to(dtype) for size in (k, n))
    schedule, result = product(tokens, n, k, dtype, gate)
    inputs = [tensor.to(DEVICE) for tensor in (x, tiled(weight), residual)]
    (found,) = run_schedule(schedule, [result], inputs, {"T": tokens})
    made = x.double() @ weight.double().T
    expected = torch.nn.functional.silu(made[:, :n]) * made[:, n:] if gate else made + residual
    assert (problem := compare(found, expected, dtype)) is None, problem


# One row, tiles of rows, and as many as the batch-invariant kernel has; sizes that no tile divides. Of 2200 columns,
# so deep and narrow, they are split among programs.
@pytest.mark.parametrize(
    ("tokens", "n", "k", "gate"),
    [(1, 37, 101, True), (1, 130, 2200, False), (7, 37, 101, True), (13, 48, 2200, False), (70, 37, 101, False)],
)
def test_products(tokens: int, n: int, k: int, gate: bool) -> None:
    check(tokens, n, k, torch.float32, gate)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (130, 2200), (4096, 4096)])
@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
def test_products_in_bf16(tokens: int, n: int, k: int, gate: bool) -> None:
    check(tokens, n, k, torch.bfloat16, gate)


@pytest.mark.slow
def test_they_compile_for_sm_90() -> None:
    assert run_without_interpreter(Path(__file__)) == dict.fromkeys(
        ("linear_matvec", "linear_tile", "linear_blocks"), b"\x7fELF".hex()
    )


if __name__ == "__main__":
    register_loader(TILED)
    launches = [product(tokens, 4096, 2048, torch.bfloat16, dependent=True)[0].launches[-1] for tokens in (1, 64, 256)]
    print(json.dumps({one.kernel.fn.__name__: compile_kernel(one, 90).code[:4].hex() for one in launches}))
