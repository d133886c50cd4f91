"""What a call of loaded kernels makes and launches, where the driver is replaced."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from ingot.backends.triton import load as loading
from ingot.backends.triton.launches import LAUNCHES, Launch
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError, InternalError
from ingot.runtime.loading.load_context import on_one_device

Launched = list[tuple[list[int], list[int]]]


class Recorded:
    """In place of a launch: the grid of its sizes, and the addresses that it was given."""

    calls: ClassVar[Launched] = []
    grids: ClassVar[list[list[int]]] = []

    def __init__(self, *args: object, dependent: bool) -> None:
        del args, dependent
        self.streams: list[int] = []

    def resize(self, sizes: dict[str, int]) -> None:
        Recorded.grids.append([sizes["T"], sizes["B"]])

    def run_on(self, stream: int) -> None:
        self.streams.append(stream)

    def __call__(self, inputs: list[int], made: list[int]) -> None:
        Recorded.calls.append((inputs, made))


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> loading.Call:
    """Of two launches: tensors of T and of B rows in, an output of each and scratch in between."""
    launch = {"kernel": "k", "entry": "f", "grid": [1, 1, 1], "arguments": [], "warps": 1, "shared": 0}
    text = {
        "inputs": ["bf16[T, 4]", "f32[2, B]"],
        "aligned": [0],
        "buffers": {
            "first": {"dtype": "f32", "shape": ["T", 3], "kind": "output"},
            "between": {"dtype": "i32", "shape": [{"op": "mul", "left": "B", "right": 2}], "kind": "scratch"},
            "last": {"dtype": "bf16", "shape": ["B", "T", 2], "kind": "output"},
        },
        "outputs": ["last", "first"],
        "launches": [{**launch, "dependent": False}] * 2,
    }
    (tmp_path / LAUNCHES).write_text(json.dumps(text))
    monkeypatch.setattr(loading, "make_context_current", lambda device: None)
    monkeypatch.setattr(loading, "load_function", lambda *args: 7)
    monkeypatch.setattr(loading, "PreparedLaunch", Recorded)
    monkeypatch.setattr(loading, "current_stream", lambda device: 77)
    # The function's twin, for the machine has no GPU.
    monkeypatch.setattr(loading, "new_tensor", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(Recorded, "calls", [])
    monkeypatch.setattr(Recorded, "grids", [])
    executable = Executable(id="e", backend="triton", inputs=(), outputs=(), files=())
    return loading.load(executable, tmp_path, on_one_device("cpu"))


def test_buffers_are_of_the_sizes_of_each_call(call: loading.Call) -> None:
    draw = random.Random(3)
    sizes = [(draw.randint(1, 40), draw.randint(1, 9)) for _ in range(5)]
    for tokens, rows in [size for size in sizes for _ in range(2)]:  # two layers, and then another step
        given = torch.empty(tokens, 4, dtype=torch.bfloat16), torch.empty(2, rows)
        last, first = call(*given)
        assert (last.shape, last.dtype) == ((rows, tokens, 2), torch.bfloat16) and last.is_contiguous()
        assert (first.shape, first.dtype) == ((tokens, 3), torch.float32) and first.is_contiguous()
        for inputs, made in Recorded.calls[-2:]:
            assert inputs == [one.data_ptr() for one in given]
            assert [made[0], made[2]] == [first.data_ptr(), last.data_ptr()] and len(made) == 3
    assert len(Recorded.calls) == 2 * 10
    assert Recorded.grids == [list(size) for size in sizes for _ in range(2)], "once a step for each launch"


def test_a_tensor_that_lies_askew_is_refused(call: loading.Call) -> None:
    flat = torch.empty(41, dtype=torch.bfloat16)
    with pytest.raises(InternalError, match="tensor 0 of a call is at the address"):
        call(flat[1:].view(10, 4), torch.empty(2, 3))
    assert not Recorded.calls


def test_how_many_blocks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked for blocks of eight warps, and a status that is no success is an error."""
    driver = pytest.importorskip("cuda.bindings.driver")
    launch = Launch(kernel="k", entry="f", grid=(1, 1, 1), arguments=(), warps=8, shared=40, dependent=True)
    answers = {(7, 256, 40): (driver.CUresult.CUDA_SUCCESS, 4)}
    failed = driver.CUresult.CUDA_ERROR_INVALID_VALUE, 0
    name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    monkeypatch.setattr(driver, name, lambda *given: answers.get(given, failed))
    assert loading.resident_blocks(7, launch) == 4
    with pytest.raises(BackendError, match="how many blocks of f fit: CUDA_ERROR_INVALID_VALUE"):
        loading.resident_blocks(8, launch)
