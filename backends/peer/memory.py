"""The memory that the GPUs of a mesh axis share: made by each rank, and opened by all others (CUDA IPC)."""

import ctypes
import logging
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.backends.peer.layout import ABORT, ABORTED, ERROR, MOST_RANKS, WORDS
from ingot.ir.errors import BackendError, RankError

# CU_IPC_HANDLE_SIZE in cuda.h.
HANDLE_BYTES = 64
# "0000:1b:00.0" and the end of the text: cuDeviceGetPCIBusId.
BUS_BYTES = 16
# A reason why memory cannot be shared, as it is sent to the other ranks; longer ones are cut.
_REASON_BYTES = 240

log = logging.getLogger("ingot.ranks")


class Sharing(Protocol):
    """How memory is shared. Each method raises BackendError with the driver's reason. Addresses are integers."""

    def allocate(self, size: int) -> int:
        """Return the address of new memory of zeros on this GPU. Other processes can open it."""
        ...

    def free(self, address: int) -> None:
        """Free memory of `allocate`. All ranks that opened it have closed it."""
        ...

    def handle(self, address: int) -> bytes:
        """Return the HANDLE_BYTES bytes with which other processes open the memory at `address`."""
        ...

    def bus(self) -> str:
        """Return the address of this GPU on the PCI bus."""
        ...

    def open(self, handle: bytes, bus: str) -> int:
        """Return the address at which this GPU reaches the memory of another process. `bus` is the address of its
        GPU."""
        ...

    def close(self, address: int) -> None:
        """Close memory of `open`."""
        ...


class PeerMemory:
    """The memory that the ranks of a mesh axis share, as this rank reaches it.

    communicator   connects the ranks; it is not kept
    sharing        how memory is shared
    own            as the attribute
    opened         the addresses of the memory of the other ranks, by their index
    device         this rank's GPU

    own     (attribute) the address of this rank's memory
    table   (attribute) i64[ranks] on the device: the address of the memory of each rank
    words   (attribute) i32[WORDS] on the host: whether kernels are to end, and why one has ended
    """

    def __init__(
        self, communicator: NcclCommunicator, sharing: Sharing, own: int, opened: dict[int, int], device: torch.device
    ) -> None:
        self.place, self.size = communicator.place, communicator.size
        addresses = [opened.get(place, own) for place in range(self.size)]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        # The GPU reaches pinned memory at the address that the host has (unified addressing).
        self.words = torch.zeros(WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._values = (ctypes.c_int32 * WORDS).from_address(self.words.data_ptr())  # faster to read than a tensor
        self._sharing, self.own = sharing, own  # no communicator, which holds this object
        # Not at exit, when the driver may be gone. The driver frees this rank's own memory with the process: to free
        # what another process has opened is an error, and that process may be gone, or run.
        self._end = weakref.finalize(self, _close, sharing, tuple(opened.values()))
        self._end.atexit = False

    def abort(self) -> None:
        """End the kernels that wait for other ranks. Any thread may call it."""
        self._values[ABORT] = 1

    def check(self) -> None:
        """Raise RankError if a kernel has ended without a result. Its step must be complete to see that."""
        found = self._values[ERROR]
        if found == ABORTED:
            raise RankError("an all-reduce was told to end, because another rank is gone")
        if found:
            raise RankError(
                f"an all-reduce waited too long for the rank with index {found - 1} on its mesh axis",
                expected="all ranks to run the same steps",
            )

    def close(self, communicator: NcclCommunicator) -> None:
        """Close the memory of the other ranks, and free this rank's. All ranks must call this, after their last sum."""
        self._end()
        _all_have(communicator, "", self.table.device)
        self._sharing.free(self.own)


def _close(sharing: Sharing, addresses: Sequence[int]) -> None:
    for address in addresses:
        sharing.close(address)


def share(communicator: NcclCommunicator, sharing: Sharing, device: torch.device, size: int) -> PeerMemory | None:
    """Share `size` bytes of each rank of a mesh axis with the others. All ranks must call this.

    Return None on all ranks if one of them cannot reach the memory of another one. The first rank then logs a warning
    with the reason of each.
    """
    reason, own, opened = "", 0, dict[int, int]()
    sent = bytes(HANDLE_BYTES + BUS_BYTES)
    if not communicator.one_host:
        reason = "the ranks of the axis are on several hosts, which share no memory"
    elif communicator.size > MOST_RANKS:
        reason = f"{communicator.size} ranks are more than {MOST_RANKS}"
    else:
        try:
            own = sharing.allocate(size)
            sent = sharing.handle(own) + sharing.bus().encode().ljust(BUS_BYTES, b"\0")
        except BackendError as error:
            reason = error.what
    each = _exchanged(communicator, sent, device)
    for place, one in enumerate(each):
        if place == communicator.place or reason or not any(one):
            continue
        try:
            opened[place] = sharing.open(one[:HANDLE_BYTES], one[HANDLE_BYTES:].rstrip(b"\0").decode())
        except BackendError as error:
            reason = f"the memory of the rank with index {place} cannot be opened: {error.what}"
    reasons = _all_have(communicator, reason, device)
    if not reasons:
        return PeerMemory(communicator, sharing, own, opened, device)
    _close(sharing, tuple(opened.values()))
    _all_have(communicator, "", device)  # no rank frees memory that another one has open
    if own:
        sharing.free(own)
    if communicator.place == 0:
        for place, text in reasons.items():
            log.warning("NCCL computes all all-reduces: rank with index %d on its mesh axis: %s", place, text)
    return None


def _all_have(communicator: NcclCommunicator, reason: str, device: torch.device) -> dict[int, str]:
    """Wait for all ranks, and return why a rank cannot go on, by its index. `reason` is this rank's; "": it can."""
    each = _exchanged(communicator, reason.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0"), device)
    texts = (one.rstrip(b"\0").decode(errors="replace") for one in each)
    return {place: text for place, text in enumerate(texts) if text}


def _exchanged(communicator: NcclCommunicator, sent: bytes, device: torch.device) -> list[bytes]:
    """Return the bytes of each rank, in their order. All send equally many."""
    found = communicator.gathered(torch.tensor(list(sent), dtype=torch.uint8, device=device))
    return [bytes(one) for one in found.tolist()]  # waits for the GPU
