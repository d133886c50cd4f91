"""Caches whose scratch pages are one memory: on this machine, and what becomes of each call of a driver that fails."""

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.ir.artifact.plan import State
from ingot.ir.cache.scratch_pages import Scratch
from ingot.ir.errors import InternalError, OptionError
from ingot.runtime.cpu import shared_tail as host
from ingot.runtime.cuda import shared_tail as device
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.states import States

GROUP = "window_20"
# 3 * 80 bytes a token: a page is no whole part of a granule, nor a granule of it.
KV = State(kind="paged_kv", group=GROUP, unit="token", type="bf16[pages, 1, 16, 3, 40]")
PAGE = 16 * 3 * 40 * 2
ROW = State(kind="row", group="rows", unit="sequence", type="i32[R]")
SPECS = {"kv.0": KV, "last": ROW, "kv.1": KV, "kv.2": KV}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def states(on: str, pages: int = 7, scratch: int = 5) -> States:
    areas = {GROUP: Scratch(scratch, PAGE, 3)}
    return States(SPECS, {"R": 4}, on_one_device(on).allocator, {GROUP: pages}, areas)


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("pages", [1, 7, 700])
def test_caches_have_scratch_pages_in_common(on: str, pages: int) -> None:
    made = states(on, pages)
    caches, numbers = [made[name] for name in ("kv.0", "kv.1", "kv.2")], made.scratch_pages[GROUP]
    assert list(made) == list(SPECS) and made["last"].tolist() == [0, 0, 0, 0]
    assert len(numbers) == 5 and numbers.start >= pages
    assert {tuple(cache.shape) for cache in caches} == {(numbers.stop, 1, 16, 3, 40)}
    assert all(cache.is_contiguous() and cache.device.type == on and not cache.any() for cache in caches)
    for value, cache in enumerate(caches, 1):
        cache[:pages] = value
        cache[numbers.start :] = -value
        assert all(bool((other[numbers.start :] == -value).all()) for other in caches)
        cache[numbers.stop - 1] = 100 + value
        assert all(bool((other[numbers.stop - 1] == 100 + value).all()) for other in caches)
    assert all(bool((cache[:pages] == value).all()) for value, cache in enumerate(caches, 1))
    made.zero(GROUP, [0, pages - 1] if pages > 1 else [0])
    assert not any(cache[[0, pages - 1]].any() for cache in caches)


def test_memory_of_a_cpu_is_given_back() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("ingot-scratch")

    gc.collect()
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    made = states("cpu")
    cache = made["kv.1"]
    assert mapped() == before + 3 and len(os.listdir("/proc/self/fd")) == files
    del made
    gc.collect()
    assert mapped() == before + 1
    cache[-1] = 3.0
    assert bool((cache[-1] == 3).all()), "what is left keeps the memory"
    del cache
    gc.collect()
    assert mapped() == before


@pytest.mark.gpu
@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="it counts the free memory of the whole GPU, which other workers change: run it with -n 0",
)
def test_memory_of_a_gpu_is_given_back() -> None:
    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    states("cuda")  # what the driver makes once
    before = free()
    # 3 caches of 64 MiB, and 32 MiB for all of them.
    made = states("cuda", (64 << 20) // PAGE, (32 << 20) // PAGE)
    assert (3 * 64 + 32) << 20 <= before - free() <= (3 * 66 + 36) << 20
    cache = made["kv.1"]
    del made
    assert before - free() <= (66 + 36) << 20
    cache.fill_(1.0)
    assert float(cache[-1].max()) == 1.0
    del cache
    assert before - free() <= 2 << 20


@pytest.mark.parametrize("on", DEVICES)
def test_no_memory_is_said(on: str) -> None:
    with pytest.raises(OptionError, match=f"there is no memory for the 3 caches of '{GROUP}'") as caught:
        states(on, 1 << (41 if on == "cpu" else 26))  # of a GPU 258 GB for each cache
    assert "which are scratch pages" in caught.value.expected and "fewer KV pages" in caught.value.hint
    states(on)


def test_a_system_without_files_in_memory_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.granularity() == mmap.PAGESIZE
    monkeypatch.delattr(os, "memfd_create")
    assert host.granularity() is None
    with pytest.raises(InternalError, match="cannot map shared memory"):
        states("cpu")


class Driver:
    """A driver that keeps what is mapped, and fails in the call with a number."""

    def __init__(self, fails: int, status: Any, real: Any) -> None:
        self.calls, self.fails, self.status, self.ok = 0, fails, status, real.CUresult.CUDA_SUCCESS
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.handles: set[int] = set()
        self.references: set[int] = set()
        self._next = 1 << 30

    def _does(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls += 1
            if self.calls == self.fails:
                return (self.status, None)
            return (self.ok, getattr(self, "_" + name)(*map(_plain, arguments)))

        call.__name__ = name
        return call

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        assert (alignment, address, flags) == (0, 0, 0)
        self._next += 1 << 32
        self.reserved[self._next] = size
        return self._next

    def _cuMemCreate(self, size: int, properties: Any, flags: int) -> int:
        assert properties.location.id == 0 and flags == 0
        self._next += 1
        self.handles.add(self._next)
        return self._next

    def _cuMemRelease(self, handle: int) -> None:
        self.handles.remove(handle)

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert handle in self.handles and (offset, flags) == (0, 0)
        self.mapped[address] = size, handle

    def _cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> None:
        (one,) = access
        assert count == 1 and one.location.id == 0 and self.reserved[address] == size
        assert sum(size for begin, (size, _) in self.mapped.items() if 0 <= begin - address < size + 1 << 32) >= size

    def _cuMemUnmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address)[0] == size

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= begin < address + size for begin in self.mapped)


def _plain(argument: Any) -> Any:
    return int(argument) if type(argument).__name__ == "CUdeviceptr" else argument


CALLS = ("cuMemAddressReserve", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemSetAccess", "cuMemUnmap")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    real = pytest.importorskip("cuda.bindings.driver")

    def made(fails: int = -1, status: Any = real.CUresult.CUDA_ERROR_NOT_PERMITTED) -> Driver:
        fake = Driver(fails, status, real)
        for name in (*CALLS, "cuMemAddressFree"):
            monkeypatch.setattr(real, name, fake._does(name))
        return fake

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "as_tensor", lambda one, device: SimpleTensor(one))
    yield SimpleNamespace(made=made, status=real.CUresult)


class SimpleTensor:
    """Stands for a tensor over a range."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def data_ptr(self) -> int:
        return int(self.owner.__cuda_array_interface__["data"][0])

    def zero_(self) -> None:
        """There is no memory."""


def ranges() -> list[Any]:
    return device.with_shared_tail(torch.device("cuda", 0), 3, 4 << 20, 2 << 20)


def test_what_a_driver_maps_is_unmapped(driver: Any) -> None:
    fake = driver.made()
    made = ranges()
    addresses = [one.data_ptr() for one in made]
    assert sorted(fake.reserved) == addresses and set(fake.reserved.values()) == {6 << 20} and not fake.handles
    tails = [fake.mapped[address + (4 << 20)] for address in addresses]
    assert len(set(tails)) == 1 and tails[0][0] == 2 << 20, "one memory stands at all ends"
    assert len({fake.mapped[address] for address in addresses}) == 3
    made.pop()
    assert len(fake.reserved) == 2
    made.clear()
    assert not fake.reserved and not fake.mapped


@pytest.mark.parametrize("fails", range(1, 19))
def test_a_call_that_fails_leaves_nothing_mapped(driver: Any, fails: int) -> None:
    fake = driver.made(fails)
    with pytest.raises(InternalError, match=r"cuMem\w+ failed: CUDA_ERROR_NOT_PERMITTED"):
        ranges()
    gc.collect()
    assert not fake.reserved and not fake.mapped


def test_a_driver_without_memory_is_asked_twice(driver: Any) -> None:
    fake = driver.made(1, driver.status.CUDA_ERROR_OUT_OF_MEMORY)
    made = ranges()
    assert len(fake.reserved) == 3
    made.clear()
    fake = driver.made(2, driver.status.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match="cuMemAddressReserve: CUDA_ERROR_OUT_OF_MEMORY"):
        ranges()
    assert not fake.handles and not fake.mapped
