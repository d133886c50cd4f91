"""Address ranges on a GPU that share the memory at their ends, by the driver's virtual memory management.

A kernel may read through one address what an earlier kernel, which has ended, wrote through another. No kernel may use
two addresses of the same memory (CUDA C++ programming guide, "Virtual Aliasing Support"). This holds here, because a
layer's kernels use only the range of their layer.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ingot.ir.errors import InternalError


def granularity(device: torch.device) -> int | None:
    """Return the smallest unit of memory, in bytes, that several address ranges of a GPU can share. Return None for a
    GPU without virtual memory management. Raises InternalError if a driver call fails."""
    from cuda.bindings import driver

    torch.cuda.init()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if not _called(driver.cuDeviceGetAttribute, attribute, _called(driver.cuDeviceGet, _ordinal(device))):
        return None
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_called(driver.cuMemGetAllocationGranularity, _on(device), least))


def with_shared_tail(device: torch.device, count: int, own: int, tail: int) -> list[torch.Tensor]:
    """Return `count` zeroed u8 tensors of `own` + `tail` bytes on a GPU. The first `own` bytes of each tensor are
    separate memory. The last `tail` bytes are shared by all tensors.

    Both sizes must be multiples of `granularity(device)`. The current stream writes the zeros. Memory is freed when no
    tensor uses it. Raises MemoryError, or InternalError for other driver errors.
    """
    from cuda.bindings import driver

    torch.cuda.synchronize(device)  # creates the context if there is none yet
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
    """An address range of the GPU: `own` bytes of new memory, then `tail` bytes of shared memory. `shared` is the
    driver's handle of the shared memory.

    torch can make a tensor from this object (CUDA Array Interface, version 3). The tensor keeps it alive. The range is
    unmapped and its addresses are freed when the object is garbage-collected.
    """

    def __init__(self, device: torch.device, own: int, tail: int, shared: Any) -> None:
        from cuda.bindings import driver

        self.size = own + tail
        self.address = int(_called(driver.cuMemAddressReserve, self.size, 0, driver.CUdeviceptr(0), 0))
        mapped: list[tuple[int, int]] = []
        # Not at process exit, when the driver and all its mappings may already be gone.
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
    """Unmap an address range and free its addresses, after all kernels have finished. The range has `size` bytes from
    `address` on. `mapped` has (address, size) of each part that is mapped to memory."""
    from cuda.bindings import driver

    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return  # a kernel failed, which was reported before: the context and its memory are lost
    for begin, count in mapped:
        _called(driver.cuMemUnmap, driver.CUdeviceptr(begin), count)
    _called(driver.cuMemAddressFree, driver.CUdeviceptr(address), size)


def _create(size: int, device: torch.device) -> Any:
    """Allocate `size` bytes of GPU memory and return the driver's handle of the memory. If too little is free, empty
    the cache of torch's allocator and try again."""
    from cuda.bindings import driver

    try:
        return _called(driver.cuMemCreate, size, _on(device), 0)
    except MemoryError:
        torch.cuda.empty_cache()
        return _called(driver.cuMemCreate, size, _on(device), 0)


def _on(device: torch.device) -> Any:
    """Return the driver's description of memory on the GPU `device`, for calls that allocate memory."""
    from cuda.bindings import driver

    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = _ordinal(device)
    return properties


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a driver function and return its result. Raises MemoryError or InternalError if the call fails."""
    from cuda.bindings import driver

    status, *results = function(*arguments)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError(f"{function.__name__}: {status.name}")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise InternalError(
            f"{function.__name__} failed: {status.name}",
            where="mapping memory of a GPU",
            expected="CUDA_SUCCESS",
            hint="check the GPU and its driver with nvidia-smi",
        )
    return results[0] if results else None
