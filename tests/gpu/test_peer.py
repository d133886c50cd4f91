"""The peer backend's kernel on one GPU, as two ranks at once: each has a stream, and both have memory of this GPU.

What two GPUs add (opening memory of another process, order across NVLink) is in test_mesh.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_seed import run_seed

from ingot.backends.collectives import sum_in_order
from ingot.backends.peer import load as loading
from ingot.backends.peer.call import ALL_REDUCE, PeerCall
from ingot.backends.peer.emit import Peer
from ingot.backends.peer.layout import ABORT, ABORTED, ERROR, MOST_BYTES, SHARED_BYTES, WORDS
from ingot.backends.peer.load import PreparedAdd, PreparedAllReduce
from ingot.backends.triton.load import load_function, make_context_current
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.machine.target import Target
from ingot.ir.ops import all_reduce
from ingot.ir.parse import parse_type
from ingot.ir.program import Dim, Program

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SIZE = 2
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


class Ranks:
    """Two ranks on this GPU, with the compiled kernel for a dtype. With `adds`, it adds a residual too."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, adds: bool = False) -> None:
        self.dtype = dtype
        body = Program("call", "lowered", {"T": Dim("T", 1, 64)}, bucket=BucketClass(name="few", tokens=(1, 64)))
        x = body.add_input("in0", parse_type(f"{NAMES[dtype]}[T, 8]"))
        total = build.call(body, all_reduce.overload, (x,), {"axis": "tp"})
        if adds:
            residual = body.add_input("in1", parse_type(f"{NAMES[dtype]}[T, 8]"))
            total = build.call(body, torch.ops.aten.add.Tensor, (residual, total), {})
        body.set_outputs({"out0": total})
        Peer().emit(body, "key", Target.named("cuda"), folder)
        call = PeerCall.model_validate_json((folder / ALL_REDUCE).read_text())
        launch = call.launches[str(SIZE)]
        make_context_current(torch.device("cuda", torch.cuda.current_device()))
        function = load_function(folder / launch.kernel, launch.entry, launch.shared)
        if adds:
            alone = call.launches["1"]
            self.add = PreparedAdd(alone, load_function(folder / alone.kernel, alone.entry, alone.shared))
        self.memory = torch.zeros(SIZE, SHARED_BYTES, dtype=torch.uint8, device="cuda")
        table = torch.tensor([one.data_ptr() for one in self.memory], device="cuda")
        self.words = torch.zeros(SIZE, WORDS, dtype=torch.int32, pin_memory=True)
        self.streams = [torch.cuda.Stream() for _ in range(SIZE)]
        self.kernels = []
        # Both ranks have all blocks on this GPU at once. It has room for many more of their size.
        for place in range(SIZE):
            peers: Any = SimpleNamespace(table=table, words=self.words[place], place=place, size=SIZE)
            self.kernels.append(PreparedAllReduce(peers, launch, function, 128))
        self.table = table
        torch.cuda.synchronize()
        # The driver may wait for the GPU when it first launches a kernel, so no kernel may wait then.
        self.words[:, ABORT] = 1
        ones = torch.ones(8, dtype=dtype, device="cuda")
        for place in range(SIZE):
            self.launch(place, *[ones] * (1 + adds))
        torch.cuda.synchronize()
        self.memory.zero_()
        self.words.zero_()
        torch.cuda.synchronize()

    def launch(self, place: int, *given: torch.Tensor) -> torch.Tensor:
        stream = self.streams[place]
        with torch.cuda.stream(stream):
            result = torch.full_like(given[0], -7)
            self.kernels[place](given, result, stream.cuda_stream)
        return result


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "TIMEOUT_MICROSECONDS", 20_000_000)


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[[torch.dtype], Ranks]:
    return lambda dtype: Ranks(tmp_path, dtype)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_sums_have_the_bits_of_the_order(dtype: torch.dtype, ranks: Callable[[torch.dtype], Ranks]) -> None:
    """Many calls of different sizes follow one another, and neither rank waits for the host between them."""
    both, draw = ranks(dtype), torch.Generator("cuda").manual_seed(int(run_seed(), 16))
    most = MOST_BYTES // dtype.itemsize
    sizes = [8, 4096, 8, 1024, most, 24, most // 2 + 8, *(8 * (7 * place + 1) for place in range(60))]
    values = [[torch.randn(size, generator=draw, device="cuda").to(dtype) for size in sizes] for _ in range(SIZE)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[] for _ in range(SIZE)]
    for index in range(len(sizes)):
        for place in (index % 2, 1 - index % 2):
            found[place].append(both.launch(place, values[place][index]))
    torch.cuda.synchronize()
    assert not both.words.any()
    for index, size in enumerate(sizes):
        wanted = sum_in_order([values[place][index] for place in range(SIZE)])
        for place in range(SIZE):
            assert torch.equal(found[place][index], wanted), (index, size, place)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_a_residual_is_added_to_the_rounded_sum(dtype: torch.dtype, tmp_path: Path) -> None:
    """The bits of an add after the sum: by the kernel of both, and by that of one rank, for more bytes too."""
    both, draw = Ranks(tmp_path, dtype, adds=True), torch.Generator("cuda").manual_seed(int(run_seed(), 16))
    most = MOST_BYTES // dtype.itemsize
    for size in (8, 4096, most, most // 2 + 8, 3 * most + 8):
        x = [torch.randn(size, generator=draw, device="cuda").to(dtype) for _ in range(SIZE)]
        residual = torch.randn(size, generator=draw, device="cuda").to(dtype)
        total = sum_in_order(x)
        wanted = residual + total
        torch.cuda.synchronize()
        found = [both.add(total, residual)]
        if size <= most:
            found += [both.launch(place, x[place], residual) for place in range(SIZE)]
        torch.cuda.synchronize()
        assert all(torch.equal(one, wanted) for one in found), size
    assert not both.words.any()


def test_graphs_replay_it(ranks: Callable[[torch.dtype], Ranks]) -> None:
    """A graph of three calls per rank. Each replay adds new values, so no slot or flag of an earlier one may do."""
    both = ranks(torch.bfloat16)
    inputs = [torch.zeros(5000 * 8, dtype=torch.bfloat16, device="cuda") for _ in range(SIZE)]
    results, graphs = [], []
    for place in range(SIZE):
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), both.streams[place]
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            x = inputs[place]
            for _ in range(3):
                result = torch.empty_like(x)
                both.kernels[place]([x], result, stream.cuda_stream)
                x = result
            graph.capture_end()
        results.append(x)
        graphs.append(graph)
    for number in range(1, 40):
        for place in range(SIZE):
            inputs[place].fill_(number + place)
        torch.cuda.synchronize()
        for place in (number % 2, 1 - number % 2):
            with torch.cuda.stream(both.streams[place]):
                graphs[place].replay()
        torch.cuda.synchronize()
        # n + (n + 1), then doubled twice: exact in bfloat16 up to 2^8 times a power of two.
        assert all(bool((one == 4 * (2 * number + 1)).all()) for one in results), number
    assert not both.words.any()


def test_a_rank_that_does_not_come(ranks: Callable[[torch.dtype], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "TIMEOUT_MICROSECONDS", 200_000)
    both = ranks(torch.float32)
    x = torch.ones(40_000, device="cuda")
    torch.cuda.synchronize()
    begin = time.monotonic()
    result = both.launch(0, x)
    torch.cuda.synchronize()
    assert 0.2 <= time.monotonic() - begin < 2
    assert both.words[0].tolist() == [0, 2] and both.words[0, ERROR] == 2, "1 + the rank"
    assert bool((result == -7).all()), "no sum of what has not come"
    begin = time.monotonic()
    both.launch(0, x)
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 0.1, "a later call does not wait"


def test_an_abort_ends_a_kernel_that_waits(ranks: Callable[[torch.dtype], Ranks]) -> None:
    both = ranks(torch.float32)
    x = torch.ones(40_000, device="cuda")
    torch.cuda.synchronize()
    result = both.launch(1, x)
    time.sleep(0.3)
    assert not both.streams[1].query(), "the kernel waits"
    both.words[1, ABORT] = 1
    begin = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 1
    assert both.words[1, ERROR] == ABORTED and bool((result == -7).all())
