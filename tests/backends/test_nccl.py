"""The collectives of GPUs, over NCCL's functions in host memory: values, order, faults, and the library's names."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nccl import FakeNccl, joined
from run_seed import run_seed

from ingot.backends.nccl import communicator as communicator_module
from ingot.backends.nccl import library as library_module
from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.backends.nccl.emit import NcclBackend
from ingot.backends.nccl.library import SIGNATURES, Nccl, UniqueId, interface_of, load_nccl
from ingot.backends.nccl.load import collectives
from ingot.backends.nccl.meeting import find, leave
from ingot.ir.errors import BackendError, InternalError, RankError, TargetError
from ingot.ir.machine.meeting import MeetingPlace
from ingot.ir.ops import OPS

CPU = torch.device("cpu")


def functions(one: NcclCommunicator) -> Any:
    context: Any = SimpleNamespace(communicators={"tp": one})
    return collectives(context)


def called(name: str, values: list[torch.Tensor], attributes: dict[str, Any]) -> list[torch.Tensor]:
    """The results of a collective on each rank. `values` has the argument of each."""
    return joined(
        FakeNccl(),
        len(values),
        lambda one: functions(one)[f"ingot.{name}"](values[one.place], axis="tp", **attributes),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_are_the_ops(size: int, dtype: torch.dtype) -> None:
    """Bit by bit, with values whose sum depends on the order, on slices that are not row-major, and for one row."""
    draw = torch.Generator().manual_seed(int(run_seed(), 16))
    for rows in (1, 5, 8 * size):
        wide = [
            torch.randn(rows, 24 * size, generator=draw) * 10 ** torch.randint(-3, 4, (1,), generator=draw)
            for _ in range(size)
        ]
        values = [one.to(dtype)[:, : 12 * size] for one in wide]
        for name, attributes in (
            ("all_reduce", {}),
            ("all_gather", {"dim": 1, "parts": size}),
            ("all_gather", {"dim": 0, "parts": size}),
            ("reduce_scatter", {"dim": 1, "parts": size}),
            ("reduce_scatter", {"dim": 0, "parts": size}),
            ("take_part", {"dim": 1, "parts": size}),
            ("take_part", {"dim": 0, "parts": size}),
        ):
            op = OPS[name]
            assert op.across is not None
            wanted = op.across(values, axis="tp", **attributes)
            for mine, theirs in zip(called(name, values, attributes), wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
                assert mine.is_contiguous()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 7, 12])
def test_rows_are_split_and_gathered(rows: int, size: int) -> None:
    """The sum of rows that may not divide is that of an all-reduce, bit by bit."""
    values = [torch.randn(rows, 6).bfloat16() * 10.0**place for place in range(size)]
    attributes = {"axis": "tp", "dim": 0, "parts": size}

    def work(one: NcclCommunicator) -> torch.Tensor:
        part = functions(one)["ingot.reduce_scatter"](values[one.place], **attributes)
        found: torch.Tensor = functions(one)["ingot.all_gather"](part, values[0], **attributes)
        return found

    fake = FakeNccl()
    found = joined(fake, size, work)
    for mine, theirs in zip(found, called("all_reduce", values, {}), strict=True):
        assert torch.equal(mine, theirs) and mine.is_contiguous()
    kinds = {kind for _, kind in fake.called}
    assert ("reduce part" in kinds) is (size == 2), "of two ranks, NCCL adds; more exchange parts"


def test_the_embedding_of_a_part_of_the_vocabulary() -> None:
    tables = [torch.randn(5, 3), torch.randn(5, 3)]
    tokens = torch.tensor([0, 9, 4, 5, 5], dtype=torch.int32)
    call = lambda one: functions(one)["ingot.vocab_embedding"](tokens, tables[one.place], axis="tp", parts=2)  # noqa: E731
    found = joined(FakeNccl(), 2, call)
    assert torch.equal(found[0] + found[1], torch.cat(tables)[tokens.long()])


def test_an_axis_without_ranks() -> None:
    with pytest.raises(InternalError, match="along the axis 'pp'"):
        joined(FakeNccl(), 2, lambda one: functions(one)["ingot.all_reduce"](torch.ones(2), axis="pp"))


def test_stages_send_and_receive() -> None:
    value = torch.randn(6, 4).to(torch.bfloat16)

    def work(one: NcclCommunicator) -> torch.Tensor:
        if one.place == 0:
            one.send(value.t(), 1)  # not row-major
            return value
        into = torch.empty(4, 6, dtype=torch.bfloat16)
        one.receive(into, 0)
        return into

    assert torch.equal(joined(FakeNccl(), 2, work)[1], value.t())


def test_an_abort_ends_a_call_that_waits() -> None:
    """Rank 1 never calls. Another thread aborts rank 0, which then refuses every call, and aborts once."""
    fake, entered = FakeNccl(), threading.Event()

    def work(one: NcclCommunicator) -> Any:
        if one.place == 1:
            entered.wait(10)
            return None
        watching = threading.Timer(0.1, one.abort)
        watching.start()
        entered.set()
        assert one.alive
        with pytest.raises(RankError, match="the connection to another rank is broken"):
            one.total(torch.ones(3))
        watching.join()
        assert not one.alive
        ones = torch.ones(1)
        calls = (lambda: one.total(ones), lambda: one.send(ones, 1), lambda: one.exchange(torch.ones(2, 1)))
        for call in calls:
            with pytest.raises(RankError, match="was ended, because one of them is gone"):
                call()
        one.abort()
        return "done"

    assert joined(fake, 2, work)[0] == "done"
    assert fake.called.count((0, "ncclCommAbort")) == 1, "with this object's end as well"


@pytest.mark.parametrize(("status", "kind"), [(2, RankError), (6, RankError), (5, BackendError)])
def test_a_status_is_an_error_of_its_kind(status: int, kind: type[Exception]) -> None:
    fake = FakeNccl()
    fake.fails["ncclAllGather"] = status
    caught = joined_errors(fake)
    assert all(type(one) is kind and "ncclAllGather" in str(one) for one in caught)


def joined_errors(fake: FakeNccl) -> list[BaseException]:
    def work(one: NcclCommunicator) -> Any:
        try:
            one.gather(torch.ones(2))
        except Exception as error:
            return [error]

    return [error for (error,) in joined(fake, 2, work)]


def test_ranks_meet_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor that the table names: the first rank leaves the identity, the other one waits for it."""
    nccl = Nccl(FakeNccl())
    gpu = SimpleNamespace(product="NVIDIA H200", driver="13.0")
    monkeypatch.setattr(communicator_module, "load_nccl", lambda address: nccl)
    monkeypatch.setattr(communicator_module, "find_gpu", lambda: gpu)
    monkeypatch.setattr(communicator_module, "current_stream", lambda device: 0)
    found: list[Any] = [None, None]

    def run(place: int) -> None:
        one = NcclCommunicator(MeetingPlace(tmp_path), "tp-0", place, 2)
        found[place] = one, one.total(torch.full((3,), place + 1.0))

    threads = [threading.Thread(target=run, args=(place,)) for place in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value.tolist() for _, value in found] == [[3.0] * 3] * 2
    assert [one.name for one in tmp_path.iterdir()] == ["tp-0.nccl"]


@pytest.mark.parametrize("name", ["the GPU", "the driver's CUDA version", "the version of torch"])
def test_ranks_that_differ_are_refused(name: str, tmp_path: Path) -> None:
    facts = {"the GPU": "NVIDIA H200", "the driver's CUDA version": "13.0", "the version of torch": "2.11"}
    meeting = MeetingPlace(tmp_path)
    leave(meeting, "tp-0", b"\1" * 128, facts)
    assert find(meeting, "tp-0", facts) == b"\1" * 128
    with pytest.raises(
        TargetError, match=f"ranks of the mesh differ: {name} is {facts[name]} on one, and other on"
    ) as caught:
        find(meeting, "tp-0", {**facts, name: "other"})
    assert caught.value.hint
    json.loads((tmp_path / "tp-0.nccl").read_text())


def test_a_first_rank_that_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="the first rank of tp-0 does not come"):
        find(MeetingPlace(tmp_path), "tp-0", {}, seconds=0.05)


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    load_nccl.cache_clear()
    monkeypatch.setattr(library_module.ctypes, "CDLL", missing)
    with pytest.raises(BackendError, match="NCCL cannot be loaded") as caught:
        load_nccl()
    assert "torch with CUDA" in caught.value.hint


def test_nccl_meets_at_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback interface for ranks of one host. A variable of the user stays."""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setattr(library_module.ctypes, "CDLL", lambda name: FakeNccl())
    for address, wanted in (("127.0.0.1", "=lo"), ("203.0.113.1", "=lo")):  # the second one is of no host: RFC 5737
        load_nccl.cache_clear()
        load_nccl(address)
        assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_NVLS_ENABLE"]) == (wanted, "0")
    assert interface_of("127.0.0.1") == "lo"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    load_nccl.cache_clear()
    with pytest.raises(BackendError, match=r"no network interface .* has the address 203\.0\.113\.1") as caught:
        load_nccl("203.0.113.1")
    assert "NCCL_SOCKET_IFNAME" in caught.value.hint
    load_nccl.cache_clear()


# What nccl.h calls the types of arguments, and how ctypes passes them.
_TYPES = (
    (r"ncclUniqueId\s*\*", ctypes.POINTER(UniqueId)),
    (r"ncclUniqueId", UniqueId),
    (r"ncclComm_t\s*\*", ctypes.POINTER(ctypes.c_void_p)),
    (r"int\s*\*", ctypes.POINTER(ctypes.c_int)),
    (r"(const )?void\s*\*|ncclComm_t|cudaStream_t", ctypes.c_void_p),
    (r"size_t", ctypes.c_size_t),
    (r"int|ncclDataType_t|ncclRedOp_t", ctypes.c_int),
)


def test_the_signatures_are_those_of_the_header() -> None:
    """Of NCCL's package, if it is installed: torch's builds with CUDA require it."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("NCCL's package is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    header = re.sub(r"/\*.*?\*/", "", (folder / "include" / "nccl.h").read_text(), flags=re.DOTALL)
    for name, arguments in SIGNATURES.items():
        match = re.search(rf"ncclResult_t\s+{name}\(([^)]*)\)", header)
        assert match is not None, name
        declared = [one.strip() for one in match[1].split(",") if one.strip() not in ("", "void")]
        kinds = []
        for one in declared:
            text = re.sub(r"\s*\b\w+$", "", one) if not one.endswith("*") else one
            kinds.append(next(kind for pattern, kind in _TYPES if re.fullmatch(pattern, text.strip())))
        assert tuple(kinds) == arguments, name
    numbers = dict(re.findall(r"(nccl\w+)\s*=\s*(\d+)", header))
    dtypes = ("ncclUint8", "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16")
    assert [int(numbers[name]) for name in dtypes] == [1, 6, 7, 8, 9]
    assert [int(numbers[name]) for name in ("ncclSum", "ncclSystemError", "ncclRemoteError")] == [0, 2, 6]
    library = Nccl(ctypes.CDLL(str(folder / "lib" / "libnccl.so.2")))
    assert re.fullmatch(r"2\.\d+\.\d+", library.version())


def test_memory_is_planned_as_it_is_allocated() -> None:
    """The planner's functions allocate what the calls do, for two ranks and for more."""
    backend: Any = NcclBackend()
    x = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    call = lambda name: backend.dry_run(SimpleNamespace(target=OPS[name].overload))  # noqa: E731
    assert sum(one.nbytes for one in call("all_reduce")(x, axis="tp")) == 3 * x.nbytes
    assert call("all_gather")(x, axis="tp", dim=1, parts=2).shape == (4, 12)
    assert call("all_gather")(x, axis="tp", dim=0, parts=2).shape == (8, 6)
    assert call("take_part")(x, axis="tp", dim=1, parts=2).shape == (4, 3)
    # Padded to six rows, received, three values of two rows in float32, and the result.
    wanted = 2 * 6 * 6 * 2 + 3 * 2 * 6 * 4 + 2 * 6 * 2
    assert sum(one.nbytes for one in call("reduce_scatter")(x, axis="tp", dim=0, parts=3)) == wanted
    assert call("all_gather")(x, torch.empty(7, device="meta"), axis="tp", dim=0, parts=2).shape == (8, 6)


def test_a_communicator_is_freed_with_its_object() -> None:
    fake = FakeNccl()
    joined(fake, 2, lambda one: one.total(torch.ones(3)))
    gc.collect()
    for _ in range(200):
        if len([1 for _, name in fake.called if name == "ncclCommAbort"]) == 2:
            return
        time.sleep(0.01)
    raise AssertionError("two communicators, and two ends")


def test_a_second_connection_of_the_same_ranks() -> None:
    """It joins the same ranks, and an abort of the first ends both."""
    ready = threading.Barrier(2)

    def work(one: NcclCommunicator) -> list[float]:
        other = one.second(torch.device("cpu"))
        assert (other.place, other.size) == (one.place, one.size)
        found = [float(other.gather(torch.tensor([one.place + 5.0]))[1 - one.place])]
        found += [float(one.gather(torch.tensor([one.place + 7.0]))[1 - one.place])]
        ready.wait(10)
        one.abort()
        for each in (one, other):
            with pytest.raises(RankError):
                each.check()
        return found

    assert joined(FakeNccl(), 2, work) == [[6.0, 8.0], [5.0, 7.0]]


def test_a_second_connection_that_is_made_during_an_abort_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches aborts the first one while the second one connects, and does not know the second yet."""
    connect, ready = NcclCommunicator._connect, threading.Barrier(2)
    firsts: dict[int, NcclCommunicator] = {}

    def work(one: NcclCommunicator) -> bool:
        firsts[one.place] = one
        ready.wait(10)
        other = one.second(torch.device("cpu"))
        return other.alive

    def connected(self: NcclCommunicator, nccl: Any, identity: bytes, place: int, *given: Any) -> None:
        connect(self, nccl, identity, place, *given)
        if place in firsts:
            firsts[place].abort()

    monkeypatch.setattr(NcclCommunicator, "_connect", connected)
    assert joined(FakeNccl(), 2, work) == [False, False]
