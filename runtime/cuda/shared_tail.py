"""Ranges of addresses on a GPU whose ends are the same memory, by the driver's virtual memory management.

A kernel may write what another kernel reads by another address once it has ended, and no kernel uses two addresses of
one memory (CUDA C++ programming guide, "Virtual Aliasing Support"): a layer's kernels use the range of their layer.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ingot.ir.errors import InternalError


def granularity(device: torch.device) -> int | None:
    """Bytes in multiples of which memory can be mapped into ranges; None on a GPU that has no virtual memory
    management. Raises InternalError when the driver does not say."""
    from cuda.bindings import driver

    torch.cuda.init()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if not _called(driver.cuDeviceGetAttribute, attribute, _called(driver.cuDeviceGet, _ordinal(device))):
        return None
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_called(driver.cuMemGetAllocationGranularity, _on(device), least))


def with_shared_tail(device: torch.device, count: int, own: int, tail: int) -> list[torch.Tensor]:
    """`count` tensors of `own + tail` bytes, whose last `tail` bytes are the same memory in all of them. Both are
    multiples of the granularity. They are zeros once the current stream has come here.

    Each keeps its range as long as it is referred to, and the shared memory as well. Raises MemoryError, or
    InternalError for what else the driver says.
    """
    from cuda.bindings import driver

    torch.cuda.synchronize(device)  # makes the context where there is none yet
    shared = _create(tail, device)
    try:
        ranges = [_Range(device, own, tail, shared) for _ in range(count)]
    finally:
        _called(driver.cuMemRelease, shared)  # the ranges keep the memory
    tensors = [torch.as_tensor(one, device=device) for one in ranges]
    for one, tensor in zip(ranges, tensors, strict=True):
        if tensor.data_ptr() != one.address:
            raise InternalError("a copy was made of a range of addresses", where="with_shared_tail")
        tensor.zero_()
    return tensors


class _Range:
    """A range in the words of the CUDA Array Interface, version 3; torch keeps the object as long as the tensor. It is
    unmapped, and its addresses are given back, once nothing refers to it."""

    def __init__(self, device: torch.device, own: int, tail: int, shared: Any) -> None:
        from cuda.bindings import driver

        self.size = own + tail
        self.address = int(_called(driver.cuMemAddressReserve, self.size, 0, driver.CUdeviceptr(0), 0))
        mapped: list[tuple[int, int]] = []
        # Not at the end of the process, when the driver may be gone, and with it all that was mapped.
        self._end = weakref.finalize(self, _give_back, device, self.address, self.size, mapped)
        self._end.atexit = False
        try:
            memory = _create(own, device)
            try:
                self._map(0, own, memory, mapped)
            finally:
                _called(driver.cuMemRelease, memory)
            self._map(own, tail, shared, mapped)
            access = driver.CUmemAccessDesc()
            access.location = _on(device).location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _called(driver.cuMemSetAccess, driver.CUdeviceptr(self.address), self.size, [access], 1)
        except BaseException:
            self._end()
            raise

    def _map(self, offset: int, size: int, memory: Any, mapped: list[tuple[int, int]]) -> None:
        from cuda.bindings import driver

        _called(driver.cuMemMap, driver.CUdeviceptr(self.address + offset), size, 0, memory, 0)
        mapped.append((self.address + offset, size))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _give_back(device: torch.device, address: int, size: int, mapped: list[tuple[int, int]]) -> None:
    """Unmap a range once no kernel uses it, and give its addresses back."""
    from cuda.bindings import driver

    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return  # a kernel has failed, which was said by then: the context is lost, and all its memory with it
    for begin, count in mapped:
        _called(driver.cuMemUnmap, driver.CUdeviceptr(begin), count)
    _called(driver.cuMemAddressFree, driver.CUdeviceptr(address), size)


def _create(size: int, device: torch.device) -> Any:
    """Memory of so many bytes. What torch keeps for later is given up where that is needed."""
    from cuda.bindings import driver

    try:
        return _called(driver.cuMemCreate, size, _on(device), 0)
    except MemoryError:
        torch.cuda.empty_cache()
        return _called(driver.cuMemCreate, size, _on(device), 0)


def _on(device: torch.device) -> Any:
    """Memory of a device, as the driver describes it."""
    from cuda.bindings import driver

    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = _ordinal(device)
    return properties


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of the driver. Raises MemoryError or InternalError for a status that is no success."""
    from cuda.bindings import driver

    status, *results = function(*arguments)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError(f"{function.__name__}: {status.name}")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise InternalError(
            f"{function.__name__} failed: {status.name}",
            where="mapping memory of a GPU",
            expected="CUDA_SUCCESS",
            hint="see what nvidia-smi says of the GPU and its driver",
        )
    return results[0] if results else None
