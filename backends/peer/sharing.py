"""Memory of GPUs that processes share: the driver's functions of CUDA IPC."""

import ctypes
from typing import Any

import torch

from ingot.backends.peer.memory import BUS_BYTES, HANDLE_BYTES
from ingot.backends.triton.load import make_context_current
from ingot.ir.errors import BackendError


class CudaSharing:
    """Shares memory of the GPU `device`, in torch's context. `memory.Sharing` describes the methods.

    The processes need not see the GPUs of each other: since CUDA 10.1, memory of such GPUs can be opened (NCCL's
    src/transport/p2p.cc).
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver, self._place = driver, device
        make_context_current(device)
        self._device = self._call("cuDeviceGet", device.index)

    def allocate(self, size: int) -> int:
        address = self._call("cuMemAlloc", size)
        self._call("cuMemsetD8", address, 0, size)
        self._call("cuCtxSynchronize")
        return int(address)

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def handle(self, address: int) -> bytes:
        held = self._call("cuIpcGetMemHandle", address)  # the bytes are there as long as this object
        return ctypes.string_at(held.getPtr(), HANDLE_BYTES)

    def bus(self) -> str:
        text: bytes = self._call("cuDeviceGetPCIBusId", BUS_BYTES, self._device)
        return text.split(b"\0")[0].decode()

    def open(self, handle: bytes, bus: str) -> int:
        self._check_reach(bus)
        held = self._driver.CUipcMemHandle()
        ctypes.memmove(held.getPtr(), handle, HANDLE_BYTES)
        flag = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", held, flag.value))

    def close(self, address: int) -> None:
        make_context_current(self._place)  # any thread may drop the last reference
        self._call("cuIpcCloseMemHandle", address)

    def _check_reach(self, bus: str) -> None:
        """Raise BackendError if this GPU cannot access the memory of the GPU at `bus`.

        If this process does not see that GPU, opening its memory says it.
        """
        status, other = self._driver.cuDeviceGetByPCIBusId(bus.encode())
        if status != self._driver.CUresult.CUDA_SUCCESS:
            return
        if not self._call("cuDeviceCanAccessPeer", self._device, other):
            raise BackendError(f"the GPU {self.bus()} cannot access the memory of the GPU {bus}")

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *found = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{name} says {status.name}")
        return found[0] if found else None
