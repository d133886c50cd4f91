"""The peer backend's kernels on one GPU, as two ranks at once: each has a stream, and both have memory of this GPU.

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
from ingot.backends.peer import prepared as preparing
from ingot.backends.peer.call import ALL_REDUCE, PeerCall
from ingot.backends.peer.emit import Peer
from ingot.backends.peer.layout import (
    ABORT,
    ABORTED,
    ERROR,
    MOST_BYTES,
    PUSH_CHUNK_BYTES,
    PUSH_PER_CORE,
    WORDS,
    shared_bytes,
)
from ingot.backends.peer.prepared import PreparedAdd, PreparedAllReduce, PreparedPush
from ingot.backends.triton.load import load_function, make_context_current, resident_blocks
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
    """Two ranks on this GPU, with a compiled kernel for a dtype. With `adds`, it adds a residual too.

    With `pushes`, it is the kernel for many bytes. Each rank then has half as many programs as the GPU has
    multiprocessors: those of both have room at once, with those of dependent launches that have already begun.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, *, adds: bool = False, pushes: bool = False) -> None:
        self.dtype = dtype
        most = 1 << 17  # 2 or 4 MiB: there is a kernel for many bytes
        body = Program("call", "lowered", {"T": Dim("T", 1, most)}, bucket=BucketClass(name="many", tokens=(1, most)))
        x = body.add_input("in0", parse_type(f"{NAMES[dtype]}[T, 8]"))
        total = build.call(body, all_reduce.overload, (x,), {"axis": "tp"})
        if adds:
            residual = body.add_input("in1", parse_type(f"{NAMES[dtype]}[T, 8]"))
            total = build.call(body, torch.ops.aten.add.Tensor, (residual, total), {})
        body.set_outputs({"out0": total})
        Peer().emit(body, "key", Target.named("cuda"), folder)
        call = PeerCall.model_validate_json((folder / ALL_REDUCE).read_text())
        launch = call.push if pushes else call.launches[str(SIZE)]
        assert launch is not None
        make_context_current(torch.device("cuda", torch.cuda.current_device()))
        function = load_function(folder / launch.kernel, launch.entry, launch.shared)
        if adds:
            alone = call.launches["1"]
            self.add = PreparedAdd(alone, load_function(folder / alone.kernel, alone.entry, alone.shared))
        cores = torch.cuda.get_device_properties(0).multi_processor_count
        assert resident_blocks(function, launch) >= 2 * PUSH_PER_CORE, "62 registers in threads of eight warps"
        self.programs = cores // SIZE
        shared = shared_bytes(SIZE, self.programs)
        self.memory = torch.zeros(SIZE, shared, dtype=torch.uint8, device="cuda")
        table = torch.tensor([one.data_ptr() for one in self.memory], device="cuda")
        self.words = torch.zeros(SIZE, WORDS, dtype=torch.int32, pin_memory=True)
        self.streams = [torch.cuda.Stream() for _ in range(SIZE)]
        self.kernels: list[PreparedAllReduce | PreparedPush] = []
        # Both ranks have all blocks on this GPU at once. It has room for many more of their size.
        for place in range(SIZE):
            own = self.memory[place].data_ptr()
            peers: Any = SimpleNamespace(own=own, table=table, words=self.words[place], place=place, size=SIZE)
            self.kernels.append(
                PreparedPush(peers, launch, function, self.programs)
                if pushes
                else PreparedAllReduce(peers, launch, function, 128)
            )
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

    @property
    def most(self) -> int:
        """The bytes of a large call: the most of the kernel for few bytes, or five chunks of each program that pushes,
        which are shorter than they may be."""
        five = 5 * self.programs * PUSH_CHUNK_BYTES - 4096
        return five if isinstance(self.kernels[0], PreparedPush) else MOST_BYTES

    def launch(self, place: int, *given: torch.Tensor) -> torch.Tensor:
        stream = self.streams[place]
        with torch.cuda.stream(stream):
            result = torch.full_like(given[0], -7)
            self.kernels[place](given, result, stream.cuda_stream)
        return result


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "TIMEOUT_MICROSECONDS", 20_000_000)


@pytest.fixture(params=[False, True], ids=["few", "many"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[torch.dtype], Ranks]:
    """Ranks with the kernel for few bytes, and with that for many."""
    return lambda dtype: Ranks(tmp_path, dtype, pushes=request.param)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_sums_have_the_bits_of_the_order(dtype: torch.dtype, ranks: Callable[[torch.dtype], Ranks]) -> None:
    """Many calls of different sizes follow one another, and neither rank waits for the host between them."""
    both, draw = ranks(dtype), torch.Generator("cuda").manual_seed(int(run_seed(), 16))
    most = both.most // dtype.itemsize
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


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_a_residual_is_added_to_the_rounded_sum(dtype: torch.dtype, pushes: bool, tmp_path: Path) -> None:
    """The bits of an add after the sum: by the kernel of both, and by that of one rank, for more bytes too."""
    both = Ranks(tmp_path, dtype, adds=True, pushes=pushes)
    draw = torch.Generator("cuda").manual_seed(int(run_seed(), 16))
    most = both.most // dtype.itemsize
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
    inputs = [torch.zeros(both.most // 32 * 16 - 8, dtype=torch.bfloat16, device="cuda") for _ in range(SIZE)]
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
    monkeypatch.setattr(preparing, "TIMEOUT_MICROSECONDS", 200_000)
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
