"""Ranges of addresses on a CPU whose ends are the same memory."""

import ctypes
import mmap
import os

import torch

# From <bits/mman-linux.h>; Python's mmap maps nowhere else than where the kernel chooses.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def granularity() -> int | None:
    """Bytes in multiples of which memory can be mapped into ranges; None on a system without files in memory."""
    return mmap.PAGESIZE if hasattr(os, "memfd_create") else None


def with_shared_tail(count: int, own: int, tail: int) -> list[torch.Tensor]:
    """`count` tensors of `own + tail` bytes, zeros; the last `tail` bytes are the same memory in all of them.

    Each keeps its range as long as it is referred to, and the shared memory as well. Raises MemoryError.
    """
    try:
        shared = os.memfd_create("ingot-scratch")
        try:
            os.ftruncate(shared, tail)
            return [_range(own, tail, shared) for _ in range(count)]
        finally:
            os.close(shared)  # the ranges keep what it stands for
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from error


def _range(own: int, tail: int, shared: int) -> torch.Tensor:
    """One range, which is unmapped as a whole once nothing refers to it."""
    memory = mmap.mmap(-1, own + tail, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if function(start + own, tail, mmap.PROT_READ | mmap.PROT_WRITE, flags, shared, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap of scratch pages failed: " + os.strerror(ctypes.get_errno()))
    return torch.frombuffer(memory, dtype=torch.uint8)
