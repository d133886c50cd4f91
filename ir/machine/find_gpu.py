"""Find the GPU of this machine through the driver, without creating a context or initializing torch's CUDA."""

import contextlib
import ctypes
from functools import cache
from typing import Any

import torch

from ingot.ir.errors import TargetError
from ingot.ir.machine.gpus import Gpu

# CUdevice_attribute in cuda.h.
_MULTIPROCESSORS, _CLOCK, _BUS_WIDTH, _MAJOR, _MINOR = 16, 36, 37, 75, 76
# NVML_FEATURE_ENABLED and NVML_NVLINK_MAX_LINKS in nvml.h.
_ENABLED, _MOST_LINKS = 1, 18


@cache
def find_gpu() -> Gpu:
    """Return the facts of this machine's first visible GPU, which is torch's default.

    Raises TargetError with the reason if no GPU can be used. The result is cached for the process, because the search
    is slow.
    """
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise _none("it has no NVIDIA driver (libcuda.so.1)") from None
    if torch.version.cuda is None:
        raise _none(f"torch {torch.__version__} is built without CUDA", "install a build of torch with CUDA")
    _call(driver, "cuInit", 0)
    device = _number(driver, "cuDeviceGet", 0)

    def attribute(which: int) -> int:
        return _number(driver, "cuDeviceGetAttribute", which, device)

    memory, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    _call(driver, "cuDeviceGetName", name, len(name), device)
    newest = _number(driver, "cuDriverGetVersion")
    return Gpu(
        product=name.value.decode(errors="replace"),
        sm=10 * attribute(_MAJOR) + attribute(_MINOR),
        memory=memory.value,
        cores=attribute(_MULTIPROCESSORS),
        # Two transfers per cycle of the memory clock (kHz) over a bus of so many bits.
        bandwidth=2 * attribute(_CLOCK) * 1000 * attribute(_BUS_WIDTH) // 8 or None,
        links=_number(driver, "cuDeviceGetCount") > 1 and _has_links(driver, device),
        driver=f"{newest // 1000}.{newest % 1000 // 10}",
    )


def _none(reason: str, hint: str = "compile for a named target, as in --target sm_90") -> TargetError:
    return TargetError(f"this machine has no GPU that can be used: {reason}", hint=hint)


def _call(driver: Any, function: str, *arguments: Any) -> None:
    status = getattr(driver, function)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(text))
        raise _none(f"{function} says {(text.value or str(status).encode()).decode()}")


def _number(driver: Any, function: str, *arguments: Any) -> int:
    """Call a function of the CUDA driver that writes an int to its first argument, and return this int.

    `arguments` are the arguments after the first.
    """
    found = ctypes.c_int()
    _call(driver, function, ctypes.byref(found), *arguments)
    return found.value


def _has_links(driver: Any, device: int) -> bool:
    """Return whether a GPU has an active NVLink, by NVIDIA's management library. False if the library is missing."""
    bus = ctypes.create_string_buffer(32)
    _call(driver, "cuDeviceGetPCIBusId", bus, len(bus), device)
    with contextlib.suppress(OSError):
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return False
        try:
            handle, state = ctypes.c_void_p(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)):
                return False
            return any(
                nvml.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(state)) == 0 and state.value == _ENABLED
                for link in range(_MOST_LINKS)
            )
        finally:
            nvml.nvmlShutdown()
    return False
