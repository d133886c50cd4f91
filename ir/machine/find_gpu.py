"""Find the GPU of this machine through the driver, without creating a context or importing torch."""

import contextlib
import ctypes
import importlib.util
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
    return _gpu(_driver(), 0)


def find_gpus() -> tuple[Gpu, ...]:
    """Return the facts of all GPUs that this process can use, in their order. Raises TargetError if there is none."""
    driver = _driver()
    return tuple(_gpu(driver, index) for index in range(_number(driver, "cuDeviceGetCount")))


def reaches(first: int, second: int) -> bool:
    """Return whether one GPU can access another one's memory. Both are indices of visible GPUs."""
    driver = _driver()
    places = (_number(driver, "cuDeviceGet", index) for index in (first, second))
    return bool(_number(driver, "cuDeviceCanAccessPeer", *places))


def _driver() -> Any:
    """Load the driver and initialize it. Raises TargetError if there is none, or no torch that could use it."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise _none("it has no NVIDIA driver (libcuda.so.1)") from None
    version, cuda = _torch_build()
    if cuda is None:
        raise _none(f"torch {version} is built without CUDA", "install a build of torch with CUDA")
    _call(driver, "cuInit", 0)
    return driver


def _torch_build() -> tuple[str, str | None]:
    """Return the version of torch, and of the CUDA that it is built with, or None. Raises TargetError without torch.

    Importing torch takes seconds. The variant of a fat artifact is chosen before: by a server process, which needs no
    torch, and by an engine process, which imports torch while its CUDA context starts.
    """
    if (torch := sys.modules.get("torch")) is not None:
        return torch.__version__, torch.version.cuda
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise _none("torch is not installed", "install a build of torch with CUDA")
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))  # assignments of texts, and no imports
    return facts["__version__"], facts["cuda"]


def _gpu(driver: Any, index: int) -> Gpu:
    """Return the facts of the visible GPU with this index."""
    device = _number(driver, "cuDeviceGet", index)

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


@contextlib.contextmanager
def _nvml(driver: Any, device: int) -> Iterator[tuple[Any, ctypes.c_void_p] | None]:
    """Open NVIDIA's management library, and yield it with its handle of a GPU; None if the library is missing."""
    bus = ctypes.create_string_buffer(32)
    _call(driver, "cuDeviceGetPCIBusId", bus, len(bus), device)
    try:
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2():
        yield None
        return
    try:
        handle = ctypes.c_void_p()
        yield None if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)) else (nvml, handle)
    finally:
        nvml.nvmlShutdown()


def _has_links(driver: Any, device: int) -> bool:
    """Return whether a GPU has an active NVLink, by NVIDIA's management library. False if the library is missing."""
    with _nvml(driver, device) as opened:
        if opened is None:
            return False
        nvml, handle = opened
        state = ctypes.c_int()
        return any(
            nvml.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(state)) == 0 and state.value == _ENABLED
            for link in range(_MOST_LINKS)
        )
