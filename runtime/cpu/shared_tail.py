"""Address ranges on a CPU that share the memory at their ends."""

import ctypes
import mmap
import os

import torch

# From <bits/mman-linux.h>; Python's mmap cannot map at a chosen address.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def granularity() -> int | None:
    """Return the smallest unit of memory, in bytes, that several address ranges can share; None on a system where they
    cannot share memory (no memfd_create)."""
    return mmap.PAGESIZE if hasattr(os, "memfd_create") else None


def with_shared_tail(count: int, own: int, tail: int) -> list[torch.Tensor]:
    """Return `count` zeroed u8 tensors of `own` + `tail` bytes. The first `own` bytes of each are its own memory; the
    last `tail` bytes are the same memory in all of them.

    The memory lives as long as a tensor that uses it. Raises MemoryError.
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
    """Return a tensor of `own` bytes of new memory, followed by the `tail` bytes of the file descriptor `shared`. The
    memory is unmapped once nothing refers to the tensor."""
    memory = mmap.mmap(-1, own + tail, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if function(start + own, tail, mmap.PROT_READ | mmap.PROT_WRITE, flags, shared, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap of scratch pages failed: " + os.strerror(ctypes.get_errno()))
    return torch.frombuffer(memory, dtype=torch.uint8)
