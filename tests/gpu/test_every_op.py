"""Every op that the triton backend claims, as it is served: compiled to machine code, loaded, launched by the driver.

Whatever a kernel does not write is NaN, and a call may begin before the one in front of it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from call_cases import cases
from call_oracle import difference, same_bits
from emitted_calls import CLAIMED, DTYPES, Emitted, Emitting, calls, emitting, lowered
from one_call import OneCall, moved

from ingot.backends.cublas import load as cublas
from ingot.backends.triton import load as triton
from ingot.ir import ops
from ingot.ir.formats import find_format, quantize
from ingot.runtime.loading.load_context import on_one_device

pytestmark = pytest.mark.xdist_group("every_op")
# Calls in a row without a pause, so that each may begin before the one in front of it has ended.
IN_A_ROW = 4
by_op = pytest.mark.parametrize(("op", "dtype"), CLAIMED, ids=lambda value: str(value).removeprefix("torch."))


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emitting]:
    with emitting(tmp_path_factory.mktemp("calls")) as begun:
        yield begun


@pytest.fixture(scope="module")
def emitted(request: pytest.FixtureRequest, compiling: Emitting) -> dict[Any, list[Future[Emitted]]]:
    """All calls of this file's tests that will run, compiled in parallel. Other files have tests of the same name."""
    items = [item for item in request.session.items if item.path == request.path]
    mine = [item for item in items if getattr(item, "originalname", "") == "test_against_the_reference"]
    wanted = [(item.callspec.params["op"], item.callspec.params["dtype"]) for item in mine]  # type: ignore[attr-defined]
    return {(op, dtype): compiling.submit(op, dtype) for op, dtype in wanted}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that executables make for themselves holds NaN, or a number that means nothing."""
    make = triton.new_tensor

    def new(*args: Any) -> torch.Tensor:
        tensor = make(*args)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 113)

    monkeypatch.setattr(triton, "new_tensor", new)


@pytest.mark.gpu
@by_op
def test_against_the_reference(op: str, dtype: torch.dtype, emitted: dict[Any, list[Future[Emitted]]]) -> None:
    refused, context = [], on_one_device("cuda")
    for number, (call, future) in enumerate(zip(calls(op, dtype), emitted[op, dtype], strict=True)):
        made = future.result()
        if made.executable is None:
            refused.append(made.refused)
            continue
        plain, *others = in_a_row(triton.load(made.executable, made.folder, context, dependent=False), call, 1)
        problem = difference(call, plain)
        assert problem is None, f"call {number}: {problem}"
        others = in_a_row(triton.load(made.executable, made.folder, context), call, IN_A_ROW)
        for place, other in enumerate(others):
            for one, again in zip(plain, other, strict=True):
                assert same_bits(one, again), f"call {number}: dependent launch {place} gives other bits"
    print(f"{op} {dtype}: {len(emitted[op, dtype])} calls, refused: {refused}")
    # Samples of `quant_linear` and `dequantize` have all formats, those of `experts` all options. Some have no kernel.
    known = {
        "quant_linear": "format ",
        "dequantize": "format ",
        "experts": "no kernel for experts that return their input",
    }
    refused = [reason for reason in refused if op not in known or not reason.startswith(known[op])]
    assert not refused, refused


@pytest.mark.gpu
def test_every_op_that_is_claimed_is_tested(compiling: Emitting) -> None:
    assert compiling.pool.submit(lowered).result() == {op for op, _ in CLAIMED}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmuls_of_many_tokens(dtype: torch.dtype) -> None:
    """By cuBLAS."""
    linear = cublas.find_op("ingot.linear")
    assert linear is not None
    g = torch.Generator().manual_seed(2)
    large = [torch.randn(shape, generator=g).to(dtype) for shape in ((257, 896), (1152, 896), (1152,))]
    large[1] *= 896**-0.5
    for call in [*cases("linear", dtype), OneCall("linear", tuple(large))]:
        args = [None if value is None else moved(value, "cuda") for value in call.args]
        problem = difference(call, [linear(*args).cpu()])
        assert problem is None, problem


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 37, 257])
@pytest.mark.parametrize("format", ["fp8", "fp8_per_channel_per_token", "fp8_block128"])
def test_matmuls_of_eight_bit_elements(format: str, tokens: int) -> None:
    """By cuBLAS, which adds up in an order of its own: results differ by as much as they are rounded."""
    multiply, found, dtype = cublas.find_op("ingot.rounded_linear"), find_format(format), torch.bfloat16
    assert multiply is not None and found.activations is not None
    g = torch.Generator().manual_seed(tokens)
    parts = quantize(torch.randn(1152, 1024, generator=g) / 32, found)
    rows = found.activations.elements(torch.randn(tokens, 1024, generator=g), None)
    bias = () if found.activations.columns else (torch.randn(1152, generator=g).to(dtype),)
    call = OneCall("rounded_linear", (*rows, *parts.values(), *bias), {"format": format, "dtype": dtype})
    result = multiply(*(moved(value, "cuda") for value in call.args), **call.kwargs).cpu()
    exact = ops.rounded_linear.reference(*call.args, format=format, dtype=torch.float64)
    error, rounding = ((one.double() - exact).norm() / exact.norm() for one in (result, exact.to(dtype)))
    print(f"{format}, {tokens} tokens: error {error:.1e}, of the rounding to bf16 {rounding:.1e}")
    assert error < 1.5 * rounding


def in_a_row(execute: Callable[..., list[torch.Tensor]], call: OneCall, count: int) -> list[list[torch.Tensor]]:
    """The results of `count` calls on the same tensors, and on states of their own."""
    shared = [moved(tensor, "cuda") for tensor in call.tensors]
    given = [
        [moved(call.tensors[place], "cuda") if place in call.written else one for place, one in enumerate(shared)]
        for _ in range(count)
    ]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        made = [execute(*tensors) for tensors in given]
        torch.cuda.current_stream().synchronize()
    assert not any(
        not same_bits(one.cpu(), host)
        for place, (one, host) in enumerate(zip(shared, call.tensors, strict=True))
        if place not in call.written
    ), "an argument was changed"
    return [
        [one.cpu() for one in [*outputs, *(tensors[place] for place in call.written)]]
        for outputs, tensors in zip(made, given, strict=True)
    ]
