"""The peer backend without its kernel: shared memory, the choice between kernel and NCCL, and what a compile writes."""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nccl import FakeNccl, joined

from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.backends.peer import load as loading
from ingot.backends.peer import prepared as preparing
from ingot.backends.peer import sharing as sharing_module
from ingot.backends.peer.call import ALL_REDUCE, PeerCall
from ingot.backends.peer.layout import ABORT, ABORTED, ERROR, PUSH_CHUNK_BYTES, SLOT_BYTES, TILE_BYTES, shared_bytes
from ingot.backends.peer.memory import HANDLE_BYTES, PeerMemory, share
from ingot.backends.peer.sharing import CudaSharing
from ingot.backends.peer.sizes import MOST_BYTES, MOST_PUSHED_BYTES
from ingot.backends.triton.launches import Launch, Number, Pointer
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError, InternalError, RankError

CPU = torch.device("cpu")
SIZE = 1000  # of shared memory


class HostSharing:
    """Shares memory of this process. `fails` names the functions that fail, and the rank on which each does."""

    def __init__(self, place: int, fails: dict[str, int]) -> None:
        self.place, self._fails = place, fails
        self.held: dict[int, Any] = {}
        self.open_now: list[int] = []

    def _fail(self, name: str) -> None:
        if self._fails.get(name) == self.place:
            raise BackendError(f"{name} says CUDA_ERROR_{name.upper()}")

    def allocate(self, size: int) -> int:
        self._fail("allocate")
        memory = (ctypes.c_ubyte * size)()
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        del self.held[address]

    def handle(self, address: int) -> bytes:
        return address.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\7")

    def bus(self) -> str:
        return f"0000:{self.place:02x}:00.0"

    def open(self, handle: bytes, bus: str) -> int:
        self._fail("open")
        assert re.fullmatch(r"0000:0\d:00\.0", bus) and (bus != self.bus() or self.place == 9)
        self.open_now.append(int.from_bytes(handle[:8], "little"))
        return self.open_now[-1]

    def close(self, address: int) -> None:
        self.open_now.remove(address)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The warnings about ranks, as text."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ingot.ranks")
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


def shared(size: int, fails: dict[str, int]) -> tuple[list[HostSharing], list[PeerMemory | None]]:
    sharings = [HostSharing(place, fails) for place in range(size)]
    return sharings, joined(FakeNccl(), size, lambda one: share(one, sharings[one.place], CPU, SIZE))


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_the_addresses_of_all(size: int) -> None:
    sharings, found = shared(size, {})
    own = [next(iter(one.held)) for one in sharings]
    for place, peers in enumerate(found):
        assert peers is not None and peers.table.tolist() == own
        assert sorted(sharings[place].open_now) == sorted(own[:place] + own[place + 1 :])
        assert len(sharings[place].held[own[place]]) == SIZE
    found.clear()
    peers = None
    assert not any(one.open_now for one in sharings), "closed with the object"


def test_closing_frees_after_all_have_closed() -> None:
    sharings = [HostSharing(place, {}) for place in range(2)]

    def work(one: NcclCommunicator) -> None:
        peers = share(one, sharings[one.place], CPU, SIZE)
        assert peers is not None
        peers.close(one)
        assert not sharings[one.place].held and not sharings[1 - one.place].open_now

    joined(FakeNccl(), 2, work)


@pytest.mark.parametrize(("name", "rank"), [("open", 0), ("open", 2), ("allocate", 1)])
def test_a_missing_link_is_said_and_leaves_nothing(name: str, rank: int, warnings: list[str]) -> None:
    sharings, found = shared(3, {name: rank})
    assert found == [None] * 3, "all ranks decide alike"
    assert not any(one.held or one.open_now for one in sharings)
    (text,) = warnings
    assert text.startswith(f"NCCL computes all all-reduces: rank with index {rank} on its mesh axis: ")
    assert f"CUDA_ERROR_{name.upper()}" in text


def test_ranks_of_several_hosts_share_nothing(warnings: list[str]) -> None:
    """A handle of another host could open memory of this one."""
    sharings = [HostSharing(place, {}) for place in range(2)]

    def work(one: NcclCommunicator) -> PeerMemory | None:
        one.one_host = False
        return share(one, sharings[one.place], CPU, SIZE)

    assert joined(FakeNccl(), 2, work) == [None] * 2
    assert not any(one.held or one.open_now for one in sharings)
    assert len(warnings) == 2 and all("several hosts, which share no memory" in one for one in warnings)


def test_more_ranks_than_the_layout_has(warnings: list[str]) -> None:
    assert shared(9, {})[1] == [None] * 9
    assert all("9 ranks are more than 8" in one for one in warnings) and len(warnings) == 9


def test_words_are_errors_of_the_connection() -> None:
    connected = threading.Barrier(2)  # an abort ends the calls of the other rank

    def work(one: NcclCommunicator) -> Any:
        peers = share(one, HostSharing(one.place, {}), CPU, SIZE)
        assert peers is not None
        one.shares.append(peers)
        one.check()
        peers.words[ERROR] = 2
        with pytest.raises(RankError, match="waited too long for the rank with index 1"):
            one.check()
        peers.words[ERROR] = ABORTED
        with pytest.raises(RankError, match="told to end"):
            one.check()
        peers.words[ERROR] = 0
        connected.wait(10)
        one.abort()
        assert peers.words.tolist()[ABORT] == 1, "a kernel that waits sees it"
        with pytest.raises(RankError, match="was ended"):
            one.check()
        return "done"

    assert joined(FakeNccl(), 2, work) == ["done"] * 2


class Driver:
    """The driver's functions of CUDA IPC: each records its arguments. `fails` maps a name to the status it returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: dict[str, str]) -> None:
        import cuda.bindings
        from cuda.bindings import driver

        self.CUresult, self.CUipcMemHandle = driver.CUresult, driver.CUipcMemHandle
        self.CUipcMem_flags = driver.CUipcMem_flags
        self.calls: list[tuple[Any, ...]] = []
        self._fails = fails
        self._made = driver.CUipcMemHandle()
        ctypes.memmove(self._made.getPtr(), bytes(range(HANDLE_BYTES)), HANDLE_BYTES)
        monkeypatch.setattr(cuda.bindings, "driver", self)
        monkeypatch.setattr(sharing_module, "make_context_current", lambda device: None)

    def __getattr__(self, name: str) -> Any:
        found: dict[str, Any] = {
            "cuDeviceGet": 40,
            "cuMemAlloc": 1 << 40,
            "cuIpcGetMemHandle": self._made,
            "cuDeviceGetPCIBusId": b"0000:1b:00.0\0\0\0\0",
            "cuDeviceGetByPCIBusId": 41,
            "cuDeviceCanAccessPeer": 1,
            "cuIpcOpenMemHandle": 2 << 40,
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuIpcOpenMemHandle":
                arguments = (ctypes.string_at(arguments[0].getPtr(), HANDLE_BYTES), *arguments[1:])
            self.calls.append((name, *arguments))
            if name in self._fails:
                return getattr(self.CUresult, self._fails[name]), None
            results = (found[name],) if name in found else ()
            return self.CUresult.CUDA_SUCCESS, *results

        return call


def test_memory_is_shared_by_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, {})
    made = CudaSharing(torch.device("cuda", 0))
    address = made.allocate(100)
    assert address == 1 << 40 and made.bus() == "0000:1b:00.0"
    handle = made.handle(address)
    assert handle == bytes(range(HANDLE_BYTES))
    driver.calls.clear()
    assert made.open(handle, "0000:2c:00.0") == 2 << 40
    lazy = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    assert driver.calls == [
        ("cuDeviceGetByPCIBusId", b"0000:2c:00.0"),
        ("cuDeviceCanAccessPeer", 40, 41),
        ("cuIpcOpenMemHandle", handle, lazy),
    ]
    driver.calls.clear()
    made.close(2 << 40)
    made.free(address)
    assert driver.calls == [("cuIpcCloseMemHandle", 2 << 40), ("cuMemFree", 1 << 40)]


def test_a_gpu_that_this_process_does_not_see_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = {"cuDeviceGetByPCIBusId": "CUDA_ERROR_INVALID_DEVICE"}
    driver = Driver(monkeypatch, fails)
    made = CudaSharing(torch.device("cuda", 0))
    assert made.open(bytes(HANDLE_BYTES), "0000:2c:00.0") == 2 << 40
    fails["cuIpcOpenMemHandle"] = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
    with pytest.raises(BackendError, match="cuIpcOpenMemHandle says CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        made.open(bytes(HANDLE_BYTES), "0000:2c:00.0")
    assert not any(name == "cuDeviceCanAccessPeer" for name, *_ in driver.calls)


def test_a_gpu_that_is_not_linked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, {})
    made = CudaSharing(torch.device("cuda", 0))
    reach = driver.__getattr__("cuDeviceCanAccessPeer")
    monkeypatch.setattr(driver, "cuDeviceCanAccessPeer", lambda *given: (reach(*given)[0], 0), raising=False)
    with pytest.raises(BackendError, match=r"0000:1b:00\.0 cannot access the memory of the GPU 0000:2c:00\.0"):
        made.open(bytes(HANDLE_BYTES), "0000:2c:00.0")
    assert driver.calls[-2][0] == "cuDeviceCanAccessPeer", "and then the name of this GPU"


class Recorded:
    """In place of a prepared launch: what the kernel is launched with."""

    def __init__(self, launch: Launch, function: Any, fixed: Any, made: Any, *, dependent: bool) -> None:
        known = {"add": set(), "push": {"shared", "words"}, "k": {"own", "shared", "words"}}
        assert fixed.keys() == known[launch.kernel]
        assert made == {"result": 0} and function == 7
        self.sizes: list[dict[str, int]] = []
        self.calls: list[tuple[Any, Any]] = []

    def resize(self, sizes: dict[str, int]) -> None:
        self.sizes.append(sizes)

    def run_on(self, stream: int) -> None:
        assert stream == 77

    def __call__(self, inputs: Any, made: Any) -> None:
        self.calls.append((inputs, made))


def write_call(
    folder: Path, *, axis: str = "tp", adds: bool = False, pushes: bool = False, ranks: int = 2
) -> Executable:
    """With `adds`, the residual is the second input, and a kernel of one rank adds it alone. With `pushes`, there is
    the kernel for many bytes."""
    inputs = [Pointer(input=place) for place in range(1 + adds)]
    names = [*inputs, *(Pointer(buffer=name) for name in ("result", "shared", "words"))]
    numbers = [Number(value=name) for name in ("vectors", "place", "timeout")]
    shape: Any = {"entry": "f", "grid": ("blocks", 1, 1), "warps": 4, "shared": 4, "dependent": True}
    launches = {str(ranks): Launch(kernel="k", arguments=(*names, *numbers), **shape)} if axis else {}
    push = Launch(kernel="push", arguments=(*names, Number(value="chunk"), *numbers), **shape) if pushes else None
    if adds:
        launches["1"] = Launch(kernel="add", arguments=(*names[:3], numbers[0]), **shape)
    call = PeerCall(axis=axis, item=2, adds=adds, launches=launches, push=push)
    (folder / ALL_REDUCE).write_text(call.model_dump_json())
    return Executable(id="e", backend="peer", inputs=(), outputs=(), files=())


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "make_context_current", lambda device: None)
    monkeypatch.setattr(loading, "load_function", lambda *args: 7)
    monkeypatch.setattr(loading, "resident_blocks", lambda function, launch: 2)
    monkeypatch.setattr(preparing, "PreparedLaunch", Recorded)
    for module in (loading, preparing):
        monkeypatch.setattr(module, "current_stream", lambda device: 77)
    properties = SimpleNamespace(multi_processor_count=100)
    monkeypatch.setattr(loading.torch.cuda, "get_device_properties", lambda device: properties)


def loaded(one: NcclCommunicator, executable: Executable, folder: Path) -> Any:
    context: Any = SimpleNamespace(communicators={"tp": one}, device=CPU)
    return loading.load(executable, folder, context)


def test_sizes_choose_the_kernel_or_nccl(tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = write_call(tmp_path)
    sharing = HostSharing(9, {})  # of all ranks
    called = threading.Barrier(2)  # an abort ends the calls of the other rank
    monkeypatch.setattr(loading, "CudaSharing", lambda device: sharing)

    def work(one: NcclCommunicator) -> Any:
        call = loaded(one, executable, tmp_path)
        launch = call._kernel._launch
        for rows in (1, 3, 3, 50):
            x = torch.ones(rows, 2048, dtype=torch.bfloat16)
            (made,) = call(x)
            assert launch.calls[-1] == ([x.data_ptr()], [made.data_ptr()])
            assert (made.shape, made.dtype) == (x.shape, x.dtype)
        assert [(sizes["blocks"], sizes["vectors"]) for sizes in launch.sizes] == [(2, 256), (6, 768), (100, 12800)]
        assert {sizes["place"] for sizes in launch.sizes} == {one.place}
        most = min(100 * SLOT_BYTES, MOST_BYTES[2])
        for count in (most // 2 + 8, 7, 0):  # too many bytes, no whole vectors, none
            (made,) = call(torch.ones(count, dtype=torch.bfloat16))
            assert made.tolist() == [2.0] * count, "NCCL's sum"
        call(torch.ones(most // 2, dtype=torch.bfloat16))
        assert len(launch.calls) == 5
        with pytest.raises(InternalError, match="a multiple of 16"):
            call(torch.ones(17, dtype=torch.bfloat16)[1:])
        again = loaded(one, executable, tmp_path)
        assert again._peers is call._peers, "one memory for all calls of a connection"
        called.wait(10)
        one.abort()
        with pytest.raises(RankError):
            call(torch.ones(8, dtype=torch.bfloat16))
        return "done"

    assert joined(FakeNccl(), 2, work) == ["done"] * 2


def test_two_ranks_push_many_bytes(tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the bound of the other kernel to its own, in chunks of equal size by all programs of 100 multiprocessors."""
    executable = write_call(tmp_path, pushes=True)
    bound = 100 * SLOT_BYTES
    assert bound < MOST_BYTES[2], "one slot for each multiprocessor, less than the kernel could add on a larger GPU"
    sharing = HostSharing(9, {})  # of all ranks
    monkeypatch.setattr(loading, "CudaSharing", lambda device: sharing)

    def work(one: NcclCommunicator) -> Any:
        call = loaded(one, executable, tmp_path)
        few, many = call._kernel._launch, call._push._launch
        found = []
        for size in (bound, bound + 16, bound + 16, 200 * PUSH_CHUNK_BYTES + 16):
            x = torch.ones(size // 2, dtype=torch.bfloat16)
            (made,) = call(x)
            found.append((few.calls + many.calls)[-1] == ([x.data_ptr()], [made.data_ptr()]))
        assert found == [True] * 4 and len(few.calls) == 1 and len(many.calls) == 3
        # 51201 vectors are 256.005 for each program, and a chunk has a multiple of 32. 204801 are more than one chunk
        # for each, and half as many are 512.003.
        assert [{**sizes, "timeout": 0} for sizes in many.sizes] == [
            {"blocks": 178, "vectors": 51201, "chunk": 288, "place": one.place, "timeout": 0},
            {"blocks": 200, "vectors": 204801, "chunk": 544, "place": one.place, "timeout": 0},
        ]
        call.pushed = bound + 16
        for count in (bound // 2 + 16, bound // 2 + 4):  # too many bytes, no whole vectors
            (made,) = call(torch.ones(count, dtype=torch.bfloat16))
            assert made.tolist() == [2.0] * count, "NCCL's sum"
        assert len(many.calls) == 3
        return "done"

    assert joined(FakeNccl(), 2, work) == ["done"] * 2
    assert {len(memory) for memory in sharing.held.values()} == {shared_bytes(2, 200)}
    assert MOST_PUSHED_BYTES // 2 * 2 <= 2**31, "elements are counted in 32 bits"


@pytest.mark.parametrize(("ranks", "resident"), [(2, 1), (4, 2)])
def test_nccl_in_place_of_pushes(
    ranks: int, resident: int, tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """If not all programs can run at once, with a warning, and for more than two ranks."""
    executable = write_call(tmp_path, pushes=True, ranks=ranks)
    sharing = HostSharing(9, {})  # of all ranks
    monkeypatch.setattr(loading, "CudaSharing", lambda device: sharing)
    monkeypatch.setattr(loading, "resident_blocks", lambda function, launch: resident)
    count = MOST_BYTES[ranks] // 2 + 8

    def work(one: NcclCommunicator) -> Any:
        call = loaded(one, executable, tmp_path)
        (made,) = call(torch.ones(count, dtype=torch.bfloat16))
        return made.unique().tolist(), len(call._kernel._launch.calls)

    assert joined(FakeNccl(), ranks, work) == [([float(ranks)], 0)] * ranks
    text = "NCCL computes all-reduces of more than 819200 bytes: of 200 programs of a kernel, only 100 can run at once"
    assert warnings == ([text] if ranks == 2 else [])


@pytest.mark.parametrize("size", [2, 3])
def test_nccl_in_place_of_the_kernel(
    size: int, tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Without a link, and for a number of ranks without a kernel."""
    executable = write_call(tmp_path)
    monkeypatch.setattr(loading, "CudaSharing", lambda device: HostSharing(0, {"open": 0}))
    found = joined(FakeNccl(), size, lambda one: loaded(one, executable, tmp_path)(torch.ones(8))[0].tolist())
    assert found == [[float(size)] * 8] * size
    text, *others = warnings
    assert len(others) == (size == 2), "each of two ranks has a reason"
    assert ("CUDA_ERROR_OPEN" if size == 2 else "the all-reduces of 3 ranks: the kernel is for 2") in text


@pytest.mark.parametrize("linked", [True, False])
def test_a_residual_goes_to_the_kernel_or_to_an_add_after_nccl(
    linked: bool, tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The add of one rank is launched on NCCL's sum, of any size."""
    executable = write_call(tmp_path, adds=True)
    sharing = HostSharing(9, {} if linked else {"open": 9})
    monkeypatch.setattr(loading, "CudaSharing", lambda device: sharing)

    def work(one: NcclCommunicator) -> list[Any]:
        call = loaded(one, executable, tmp_path)
        add = (call.by_nccl if linked else call)._add._launch
        found = []
        for count in (16, MOST_BYTES[2] // 2 + 8):
            x, residual = torch.ones(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.bfloat16)
            (made,) = call(x, residual)
            assert made.shape == x.shape
            kernel = call._kernel._launch.calls if linked else []
            by_kernel = bool(kernel) and kernel[-1] == ([x.data_ptr(), residual.data_ptr()], [made.data_ptr()])
            by_add = bool(add.calls) and add.calls[-1][1] == [made.data_ptr()]
            if by_add:
                assert add.calls[-1][0][1] == residual.data_ptr() and add.calls[-1][0][0] != x.data_ptr(), "the sum"
                assert add.sizes[-1] == {"blocks": -(-2 * count // TILE_BYTES), "vectors": count // 8}
            found.append((by_kernel, by_add))
        return found

    small = (True, False) if linked else (False, True)
    assert joined(FakeNccl(), 2, work) == [[small, (False, True)]] * 2


def test_an_add_without_its_all_reduce(tmp_path: Path, no_gpu: None) -> None:
    """In a call of its own, for example if form-regions is left out. It needs no other rank."""
    context: Any = SimpleNamespace(communicators={}, device=CPU)
    call: Any = loading.load(write_call(tmp_path, axis="", adds=True), tmp_path, context)
    x, residual = torch.ones(3, 8), torch.ones(3, 8)
    (made,) = call(x, residual)
    assert call._add._launch.calls == [([x.data_ptr(), residual.data_ptr()], [made.data_ptr()])]


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / ALL_REDUCE).write_text('{"axis": "tp"}')
    executable = Executable(id="e", backend="peer", inputs=(), outputs=(), files=())
    with pytest.raises(BackendError, match=r"all_reduce\.json cannot be read"):
        loaded(SimpleNamespace(), executable, tmp_path)  # type: ignore[arg-type]
