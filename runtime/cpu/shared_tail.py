"""Address ranges on a CPU that share the memory at their ends."""

import ctypes
import mmap
import os

import torch

# From <bits/mman-linux.h>; Python's mmap cannot map at a chosen address.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def granularity() -> int | None:
    """Return the smallest unit of memory, in bytes, that several address ranges can share. Return None if this system
    cannot share memory (it lacks memfd_create)."""
    return mmap.PAGESIZE if hasattr(os, "memfd_create") else None


def with_shared_tail(count: int, own: int, tail: int) -> list[torch.Tensor]:
    """Return `count` zeroed u8 tensors of `own` + `tail` bytes. The first `own` bytes of each tensor are separate
    memory. The last `tail` bytes are shared by all tensors.

    Memory is freed when no tensor uses it. Raises MemoryError.
    """
    try:
        shared = os.memfd_create("ingot-scratch")
        try:
            os.ftruncate(shared, tail)
            return [_range(own, tail, shared) for _ in range(count)]
        finally:
            os.close(shared)  # the ranges keep its memory
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from error


def _range(own: int, tail: int, shared: int) -> torch.Tensor:
    """Return a u8 tensor of `own` bytes of new memory, followed by `tail` bytes of shared memory. `shared` is the file
    descriptor of the shared memory. The memory is unmapped when no tensor uses it."""
    memory = mmap.mmap(-1, own + tail, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if function(start + own, tail, mmap.PROT_READ | mmap.PROT_WRITE, flags, shared, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap of scratch pages failed: " + os.strerror(ctypes.get_errno()))
    return torch.frombuffer(memory, dtype=torch.uint8)
