"""The peer backend at run time: launches the kernel of an all-reduce, on torch's current stream."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from pydantic import ValidationError

from ingot.backends.collectives import along
from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.backends.peer.call import ALL_REDUCE, PeerCall
from ingot.backends.peer.layout import BLOCKS, SLOT_BYTES, TILE_BYTES, TIMEOUT_MICROSECONDS, VECTOR_BYTES
from ingot.backends.peer.memory import PeerMemory, share
from ingot.backends.peer.sharing import CudaSharing
from ingot.backends.torch_cuda import current_stream
from ingot.backends.triton.launches import Launch
from ingot.backends.triton.load import load_function, make_context_current
from ingot.backends.triton.prepared_launch import PreparedLaunch
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError, InternalError
from ingot.ir.machine.load_context import LoadContext

log = logging.getLogger("ingot.ranks")

LoadedCall = Callable[..., list[torch.Tensor]]


def load(executable: Executable, directory: Path, context: LoadContext) -> LoadedCall:
    """Load an all-reduce, and return a function from this rank's tensor to a list with the sum. All ranks must load it.

    NCCL computes the all-reduce if a rank cannot reach the memory of another one, or if there is no kernel for so many
    ranks; a warning says so. It also computes sums of more bytes than the ranks share. All ranks decide the same.

    Raises BackendError if all_reduce.json is malformed or the driver rejects the kernel.
    """
    try:
        call = PeerCall.model_validate_json((directory / ALL_REDUCE).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise BackendError(f"{ALL_REDUCE} cannot be read: {error}"[:500], where=str(directory)) from error
    communicator = cast(NcclCommunicator, along(context.communicators, call.axis))
    launch = call.launches.get(str(communicator.size))
    peers = None
    if launch is None:
        if communicator.place == 0:
            log.warning(
                "NCCL computes the all-reduces of %d ranks: the kernel is for %s", communicator.size, _counts(call)
            )
    else:
        peers = shared_memory(communicator, context.device)
    if launch is None or peers is None:
        return lambda x: [communicator.total(x)]
    make_context_current(context.device)
    function = load_function(directory / launch.kernel, launch.entry, launch.shared)
    cores = torch.cuda.get_device_properties(context.device).multi_processor_count
    return PeerAllReduce(communicator, peers, PreparedAllReduce(peers, launch, function, call.item, cores))


def shared_memory(communicator: NcclCommunicator, device: torch.device) -> PeerMemory | None:
    """Return the memory that the ranks of a connection share, which is made once. None: they cannot reach each other's.

    All ranks must call this.
    """
    if not communicator.shares:
        found = share(communicator, CudaSharing(device), device)
        communicator.shares.append(found)
    return cast(PeerMemory | None, communicator.shares[0])


class PreparedAllReduce:
    """The kernel's launches for sums of any size.

    peers      the shared memory
    launch     the launch for so many ranks
    function   the kernel, a function of the CUDA driver
    item       the bytes of an element
    cores      the GPU's multiprocessors: all blocks of a launch must run at once

    most       (attribute) the most bytes of a sum
    """

    def __init__(self, peers: PeerMemory, launch: Launch, function: object, item: int, cores: int) -> None:
        fixed = {"shared": peers.table.data_ptr(), "words": peers.words.data_ptr()}
        self._launch = PreparedLaunch(launch, function, fixed, {"result": 0}, dependent=True)
        self._item, self._place, self._blocks = item, peers.place, min(BLOCKS, cores)
        self.most = self._blocks * SLOT_BYTES
        self._bytes = 0  # of the last call
        self._stream: int | None = None

    def __call__(self, x: torch.Tensor, result: torch.Tensor, stream: int) -> None:
        """Launch the kernel. Both tensors are row-major, aligned to 16 bytes, and of whole vectors of 16 bytes."""
        if (size := x.nbytes) != self._bytes:
            blocks = min(self._blocks, -(-size // TILE_BYTES))
            sizes = {"blocks": blocks, "vectors": size // VECTOR_BYTES, "place": self._place}
            self._launch.resize({**sizes, "timeout": TIMEOUT_MICROSECONDS})
            self._bytes = size
        if stream != self._stream:
            self._launch.run_on(stream)
            self._stream = stream
        self._launch([x.data_ptr()], [result.data_ptr()])


class PeerAllReduce:
    """An all-reduce: of few bytes by the kernel, and of many by NCCL.

    communicator   connects the ranks through NCCL
    peers          the shared memory
    kernel         launches the kernel

    most   (attribute) the most bytes of a sum by the kernel
    """

    def __init__(self, communicator: NcclCommunicator, peers: PeerMemory, kernel: PreparedAllReduce) -> None:
        self._communicator, self._peers, self._kernel = communicator, peers, kernel
        self.most = kernel.most

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        # Sizes are equal on all ranks, so all take one way.
        if not 0 < x.nbytes <= self.most or x.nbytes % VECTOR_BYTES:
            return [self._communicator.total(x)]
        self._communicator.check()
        x = x.contiguous()
        result = torch.empty_like(x)
        if (x.data_ptr() | result.data_ptr()) % VECTOR_BYTES:
            raise InternalError(
                f"the tensor of an all-reduce is at the address {x.data_ptr():#x}", expected="a multiple of 16"
            )
        self._kernel(x, result, current_stream(x.device))
        return [result]


def _counts(call: PeerCall) -> str:
    return ", ".join(call.launches)
