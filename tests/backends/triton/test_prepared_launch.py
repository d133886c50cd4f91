"""What the driver is given for a launch is what launches.json says."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from ingot.backends.triton.launches import Expr, Launch, Number, Pointer, cdiv, evaluate, times
from ingot.backends.triton.prepared_launch import PreparedLaunch
from ingot.ir.errors import BackendError

driver: Any = pytest.importorskip("cuda.bindings.driver")
FIXED, MADE = {"counts": 2**45 + 64}, {"out": 0, "scratch": 1}


class Driver:
    """Takes launches down as the driver would read them."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.status = driver.CUresult.CUDA_SUCCESS
        self.found: dict[str, Any] = {}

    def __call__(self, config: Any, function: Any, arguments: int, extra: int) -> tuple[Any]:
        count = len(self.launch.arguments) + 2
        pointers = (ctypes.c_void_p * count).from_address(arguments)
        kinds = [ctypes.c_void_p if isinstance(one, Pointer) else KINDS[one.dtype] for one in self.launch.arguments]
        kinds += [ctypes.c_void_p] * 2
        self.found = {
            "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
            "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
            "shared": config.sharedMemBytes,
            "stream": int(config.hStream),
            "attributes": config.numAttrs,
            "function": function,
            "arguments": [kind.from_address(at).value or 0 for kind, at in zip(kinds, pointers, strict=True)],
        }
        return (self.status,)


KINDS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


def random_launch(draw: random.Random) -> Launch:
    def size() -> Expr:
        return draw.choice([draw.randint(1, 9), "T", "B", cdiv("T", 16), times("B", 3)])

    def argument() -> Pointer | Number:
        kind = draw.randrange(4)
        if kind == 0:
            return Pointer(input=draw.randrange(3))
        if kind == 1:
            return Pointer(buffer=draw.choice(["counts", "out", "scratch"]))
        return Number(value=draw.choice([size(), -5, 2**31 - 1]), dtype=draw.choice(["i32", "i64"]))

    return Launch(
        kernel="k",
        entry="f",
        grid=(size(), size(), size()),
        arguments=tuple(argument() for _ in range(draw.randint(1, 12))),
        warps=draw.choice([1, 4, 8]),
        shared=draw.randrange(9999),
        dependent=draw.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_call_gives_its_own_arguments(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    launch, dependent = random_launch(draw), draw.random() < 0.8
    fake = Driver(launch)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", fake)
    prepared = PreparedLaunch(launch, 7, FIXED, MADE, dependent=dependent)
    sizes = {"T": 0, "B": 0}
    for number in range(6):
        if number % 2 == 0:  # half of the calls have the sizes of the one before
            sizes = {"T": draw.randint(1, 5000), "B": draw.randint(1, 99)}
            prepared.resize(sizes)
            prepared.run_on(stream := draw.randrange(1, 2**47))
        inputs = [draw.randrange(2**48) for _ in range(3)]
        made = [draw.randrange(2**48) for _ in range(2)]
        prepared(inputs, made)
        buffers = {**FIXED, **{name: made[place] for name, place in MADE.items()}}
        values = [
            evaluate(one.value, sizes)
            if isinstance(one, Number)
            else inputs[one.input]
            if one.input is not None
            else buffers[str(one.buffer)]
            for one in launch.arguments
        ]
        assert fake.found == {
            "grid": tuple(evaluate(size, sizes) for size in launch.grid),
            "block": (32 * launch.warps, 1, 1),
            "shared": launch.shared,
            "stream": stream,
            "attributes": int(dependent and launch.dependent),
            "function": 7,
            "arguments": [*values, 0, 0],
        }


def test_a_launch_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = random_launch(random.Random(1))
    fake = Driver(launch)
    fake.status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuLaunchKernelEx", fake)
    prepared = PreparedLaunch(launch, 7, FIXED, MADE, dependent=True)
    prepared.resize({"T": 1, "B": 1})
    with pytest.raises(BackendError, match="the launch of f failed: CUDA_ERROR_INVALID_VALUE"):
        prepared([1, 2, 3], [4, 5])
