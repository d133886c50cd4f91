"""NCCL's C functions, called through ctypes. Ingot uses the NCCL that torch has loaded.

The functions and numbers are those of nccl.h. They have not changed since NCCL 2.10, which added bfloat16.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ingot.ir.errors import BackendError, RankError
from ingot.ir.machine.meeting import LOOPBACK

# ncclDataType_t in nccl.h.
BYTES = 1
SUMMED = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_SUM = 0  # ncclRedOp_t
# ncclSystemError and ncclRemoteError, of ncclResult_t: what a call returns whose peer is gone.
_PEER_GONE = (2, 6)
UNIQUE_ID_BYTES = 128

# NCCL's variable for the interface at which ranks meet. "=" before the name: no other one that begins so. Those of one
# host meet at the loopback interface, which has this name on each Linux.
_INTERFACE, _LOOPBACK_INTERFACE = "NCCL_SOCKET_IFNAME", "lo"
# Multicast (NVLS) would add values in another order than that of the ranks.
_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
# SIOCGIFADDR, in linux/sockios.h: the IPv4 address of an interface, at byte 20 of struct ifreq (netdevice(7)).
_GET_ADDRESS, _REQUEST, _ADDRESS_AT = 0x8915, struct.Struct("256s"), 20


class UniqueId(ctypes.Structure):
    """ncclUniqueId: what the first rank of a group hands to the others."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


_COUNT, _ADDRESS, _INT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
# The argument types of each function that returns ncclResult_t. The last two of a collective are the communicator and
# the CUDA stream.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_ADDRESS), _INT, UniqueId, _INT),
    "ncclCommAbort": (_ADDRESS,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_ADDRESS, _ADDRESS, _COUNT, _INT, _INT, _ADDRESS, _ADDRESS),
    "ncclReduceScatter": (_ADDRESS, _ADDRESS, _COUNT, _INT, _INT, _ADDRESS, _ADDRESS),
    "ncclAllGather": (_ADDRESS, _ADDRESS, _COUNT, _INT, _ADDRESS, _ADDRESS),
    "ncclSend": (_ADDRESS, _COUNT, _INT, _INT, _ADDRESS, _ADDRESS),
    "ncclRecv": (_ADDRESS, _COUNT, _INT, _INT, _ADDRESS, _ADDRESS),
}


class Nccl:
    """The functions of NCCL that Ingot uses. Each raises RankError if a peer is gone, and BackendError otherwise.

    library   the loaded library, or an object with the same functions

    Addresses and streams are integers. `comm` is the handle that `init_rank` returns. All functions but the first three
    only enqueue work on the stream.
    """

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
            self._functions[name] = function
        self._text = library.ncclGetErrorString
        self._text.argtypes, self._text.restype = (_INT,), ctypes.c_char_p

    def version(self) -> str:
        number = _INT()
        self._call("ncclGetVersion", ctypes.byref(number))
        # NCCL_VERSION in nccl.h, since 2.9: major * 10000 + minor * 100 + patch.
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> bytes:
        """Return a new identity for a group, which its first rank hands to the others."""
        made = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def init_rank(self, size: int, unique_id: bytes, place: int) -> int:
        """Join a group of `size` ranks as rank `place`, on the current GPU. It waits for all ranks."""
        comm = _ADDRESS()
        self._call("ncclCommInitRank", ctypes.byref(comm), size, UniqueId.from_buffer_copy(unique_id), place)
        return int(comm.value or 0)

    def abort(self, comm: int) -> None:
        """End the running kernels of a communicator and free it. Another thread may wait in a call meanwhile."""
        self._call("ncclCommAbort", comm)

    def group_start(self) -> None:
        """Begin a group of sends and receives, which NCCL runs at once."""
        self._call("ncclGroupStart")

    def group_end(self) -> None:
        self._call("ncclGroupEnd")

    def all_reduce(self, source: int, target: int, count: int, dtype: torch.dtype, comm: int, stream: int) -> None:
        self._call("ncclAllReduce", source, target, count, SUMMED[dtype], _SUM, comm, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: torch.dtype, comm: int, stream: int) -> None:
        """Add up `count` elements of each rank's part, and give each rank its own. `source` has the parts in order."""
        self._call("ncclReduceScatter", source, target, count, SUMMED[dtype], _SUM, comm, stream)

    def all_gather(self, source: int, target: int, size: int, comm: int, stream: int) -> None:
        """Gather `size` bytes of each rank."""
        self._call("ncclAllGather", source, target, size, BYTES, comm, stream)

    def send(self, source: int, size: int, place: int, comm: int, stream: int) -> None:
        self._call("ncclSend", source, size, BYTES, place, comm, stream)

    def receive(self, target: int, size: int, place: int, comm: int, stream: int) -> None:
        self._call("ncclRecv", target, size, BYTES, place, comm, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            text = self._text(status).decode(errors="replace")
            if status in _PEER_GONE:
                raise RankError(f"the connection to another rank is broken: {name} says '{text}'")
            raise BackendError(
                f"{name} failed: {text}", hint="set NCCL_DEBUG=WARN to see NCCL's own message", where="NCCL"
            )


def interface_of(address: str) -> str:
    """Return the name of the network interface with an IPv4 address. Raises BackendError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, _REQUEST.pack(name.encode()))
                if socket.inet_ntoa(found[_ADDRESS_AT : _ADDRESS_AT + 4]) == address:
                    return name
    raise BackendError(
        f"no network interface of this host has the address {address}",
        where="NCCL",
        hint=f"set {_INTERFACE} to the interface that the other hosts reach",
    )


@cache
def load_nccl(address: str = LOOPBACK) -> Nccl:
    """Return the NCCL that torch has loaded. Its ranks meet at an address of this host. Variables that the user has set
    stay. Raises BackendError if torch has no NCCL."""
    if _INTERFACE not in os.environ:  # NCCL reads them when the first communicator is made
        os.environ[_INTERFACE] = f"={_LOOPBACK_INTERFACE if address == LOOPBACK else interface_of(address)}"
    for name, value in _MULTICAST.items():
        os.environ.setdefault(name, value)
    try:
        return Nccl(ctypes.CDLL("libnccl.so.2"))
    except (OSError, AttributeError) as error:
        raise BackendError(
            f"NCCL cannot be loaded: {error}",
            expected="libnccl.so.2, which torch's builds with CUDA bring",
            hint="install a build of torch with CUDA, or compile the model for one GPU",
        ) from error
