"""Caches of eight bits are judged by the numbers that they stand for: rounding to either side of a tie is no fault, a
wrong scale or number is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ingot.debug.bisect.execution.one_call import wrong_results
from ingot.ir import build
from ingot.ir.cache.exact import comparable_state
from ingot.ir.cache.form import CacheForm
from ingot.ir.interpret import interpret
from ingot.ir.ops import OPS
from ingot.ir.program import Program, Stage, StateSpec
from ingot.ir.types import Dim, TensorType

FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
CACHES = [(FLOAT8, {"per_token": True}), (INT8, {"per_token": True}), (INT8, {"k_scale": 0.04, "v_scale": 0.05})]


def writes(dtype: torch.dtype, options: dict[str, Any]) -> tuple[Program, dict[str, torch.Tensor]]:
    """A program that writes three tokens into a cache, and its inputs."""
    form = CacheForm(10, 10, per_token="per_token" in options)
    program = Program("main", Stage.CACHED, {})
    kv = program.add_state("kv", StateSpec("paged_kv", "full", "token", TensorType(dtype, form.shape(4, 2))))
    k, v = (program.add_input(name, TensorType(torch.float32, ("T", 2, 10))) for name in ("k", "w"))
    slots = program.add_input("slots", TensorType(torch.int64, ("T",)))
    program.dims = {"T": Dim("T", 1, 8), "pages": Dim("pages", 1, 8)}
    program.set_outputs({"kv": build.call(program, OPS["kv_append"].overload, (kv, k, v, slots), options)})
    g = torch.Generator().manual_seed(2)
    empty = torch.full((2, *form.shape(4, 2)[1:]), -1, dtype=torch.int8).view(dtype)
    keys, values = torch.randn(2, 3, 2, 10, generator=g)
    return program, {"kv": empty, "k": keys, "w": values, "slots": torch.tensor([1, 6, 3])}


@pytest.mark.parametrize(("dtype", "options"), CACHES, ids=str)
def test_exactly_nothing_is_rounded(dtype: torch.dtype, options: dict[str, Any]) -> None:
    program, inputs = writes(dtype, options)
    exact = interpret(program, inputs, exact=True)["kv"]
    found = comparable_state(program, "kv", interpret(program, inputs)["kv"])
    assert exact.dtype is torch.float64 and exact.shape == inputs["kv"].shape == found.shape
    for token, slot in enumerate((1, 6, 3)):
        wanted = inputs["k"][token].double() / options.get("k_scale", 1.0)
        assert torch.equal(exact[slot // 4, 0, slot % 4, :, :10], wanted)
        assert not torch.equal(found[slot // 4, 0, slot % 4, :, :10], wanted)
        assert torch.allclose(found[slot // 4, 0, slot % 4, :, :10], wanted, rtol=1 / 16, atol=0.51)


def other_scale(kv: torch.Tensor) -> None:
    kv.view(torch.float32)[0, 0, 1, 0, 3] *= 1.5


def other_number(kv: torch.Tensor) -> None:
    codes = kv.view(torch.int8)
    codes[1, 1, 2, 1, 4] = 0x55 if codes[1, 1, 2, 1, 4] <= 0 else -0x55


@pytest.mark.parametrize(("dtype", "options"), CACHES, ids=str)
@pytest.mark.parametrize("fault", [None, other_scale, other_number])
def test_wrong_numbers_and_scales_are_found(
    fault: Callable[[torch.Tensor], None] | None, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    if fault is other_scale and "per_token" not in options:
        return  # it has none in the cache
    program, inputs = writes(dtype, options)
    updated = interpret(program, inputs)["kv"].clone()
    if fault is not None:
        fault(updated)
    wrong = wrong_results(program, inputs, [], {"kv": updated})
    assert (wrong is None) == (fault is None)


def test_a_number_near_a_tie_is_no_fault() -> None:
    """It lies 0.501 steps from the number below and is rounded up; a sum in another order may round it down."""
    program, inputs = writes(INT8, CACHES[2][1])
    inputs["k"][0, 0, 3] = 17.501 * 0.04
    updated = interpret(program, inputs)["kv"].clone()
    assert int(updated[0, 0, 1, 0, 3]) == 18
    updated[0, 0, 1, 0, 3] = 17
    assert wrong_results(program, inputs, [], {"kv": updated}) is None
    updated[0, 0, 1, 0, 3] = 16
    assert wrong_results(program, inputs, [], {"kv": updated}) is not None
