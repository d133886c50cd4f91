"""The peer backend at run time: launches the kernel of an all-reduce and a residual add, on torch's current stream."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from pydantic import ValidationError

from ingot.backends.collectives import along
from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.backends.peer.call import ALL_REDUCE, PeerCall
from ingot.backends.peer.layout import (
    PUSH_PER_CORE,
    PUSH_PROGRAMS,
    PUSH_RANKS,
    VECTOR_BYTES,
    shared_bytes,
)
from ingot.backends.peer.memory import PeerMemory, share
from ingot.backends.peer.prepared import PreparedAdd, PreparedAllReduce, PreparedPush, aligned
from ingot.backends.peer.sharing import CudaSharing
from ingot.backends.torch_cuda import current_stream
from ingot.backends.triton.launches import Launch
from ingot.backends.triton.load import load_function, make_context_current, resident_blocks
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError
from ingot.ir.machine.load_context import LoadContext

log = logging.getLogger("ingot.ranks")

LoadedCall = Callable[..., list[torch.Tensor]]


def load(executable: Executable, directory: Path, context: LoadContext) -> LoadedCall:
    """Load a call, and return a function from this rank's tensors to a list with the result. All ranks must load it.

    NCCL computes the all-reduce if a rank cannot reach the memory of another one, or if there is no kernel for so many
    ranks; a warning says so. It also computes sums of more bytes than the kernels do best, and those of many bytes if
    the GPU has no room for all programs of their kernel at once. All ranks decide the same, because they have GPUs of
    one kind.

    Raises BackendError if all_reduce.json is malformed or the driver rejects the kernel.
    """
    try:
        call = PeerCall.model_validate_json((directory / ALL_REDUCE).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise BackendError(f"{ALL_REDUCE} cannot be read: {error}"[:500], where=str(directory)) from error
    make_context_current(context.device)

    def function_of(launch: Launch) -> object:
        return load_function(directory / launch.kernel, launch.entry, launch.shared)

    add = None
    if call.adds:
        add = PreparedAdd(call.launches["1"], function_of(call.launches["1"]))
        if not call.axis:
            return ResidualAdd(add)
    communicator = cast(NcclCommunicator, along(context.communicators, call.axis))
    launch = call.launches.get(str(communicator.size))
    peers = None
    if launch is None:
        if communicator.place == 0:
            log.warning(
                "NCCL computes the all-reduces of %d ranks: the kernel is for %s", communicator.size, _counts(call)
            )
    else:
        cores = torch.cuda.get_device_properties(context.device).multi_processor_count
        programs = min(PUSH_PROGRAMS, PUSH_PER_CORE * cores)
        peers = shared_memory(communicator, context.device, shared_bytes(communicator.size, programs))
    if launch is None or peers is None:
        return NcclAllReduce(communicator, add)
    kernel, push = PreparedAllReduce(peers, launch, function_of(launch), cores), None
    if call.push is not None and communicator.size == PUSH_RANKS:
        function = function_of(call.push)
        resident = resident_blocks(function, call.push)
        if resident * cores >= programs:
            push = PreparedPush(peers, call.push, function, programs)
        elif communicator.place == 0:
            log.warning(
                "NCCL computes all-reduces of more than %d bytes: of %d programs of a kernel, only %d can run at once",
                *(kernel.most, programs, resident * cores),
            )
    return PeerAllReduce(communicator, peers, kernel, push, add)


def shared_memory(communicator: NcclCommunicator, device: torch.device, size: int) -> PeerMemory | None:
    """Return the memory that the ranks of a connection share, which is made once. None: they cannot reach each other's.

    It has `size` bytes on each rank. All ranks must call this.
    """
    if not communicator.shares:
        found = share(communicator, CudaSharing(device), device, size)
        communicator.shares.append(found)
    return cast(PeerMemory | None, communicator.shares[0])


class ResidualAdd:
    """The add of a residual to a sum that another call has computed. `add` launches it."""

    def __init__(self, add: PreparedAdd) -> None:
        self._add = add

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
        return [self._add(first, second)]


class NcclAllReduce:
    """An all-reduce by NCCL, and the add of a residual, if any, by a kernel after it.

    communicator   connects the ranks
    add            launches the add; None: there is none
    """

    def __init__(self, communicator: NcclCommunicator, add: PreparedAdd | None) -> None:
        self._communicator, self._add = communicator, add

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> list[torch.Tensor]:
        total = self._communicator.total(x)
        return [total if self._add is None or residual is None else self._add(total, residual)]


class PeerAllReduce:
    """An all-reduce, and the add of a residual, if any: by the kernels, and of other sizes through NCCL.

    communicator   connects the ranks through NCCL
    peers          the shared memory
    kernel         launches the kernel for few bytes
    push           launches the kernel for many bytes; None: there is none
    add            launches the add after an all-reduce by NCCL; None: there is no residual

    most      (attribute) the most bytes of a sum for which the kernel for few bytes is chosen
    largest   (attribute) the most bytes of a sum that this kernel can compute
    pushed    (attribute) the most bytes of a sum for which the kernel for many bytes is chosen; 0: there is none
    by_nccl   (attribute) computes the same for any size
    """

    def __init__(
        self,
        communicator: NcclCommunicator,
        peers: PeerMemory,
        kernel: PreparedAllReduce,
        push: PreparedPush | None = None,
        add: PreparedAdd | None = None,
    ) -> None:
        self._communicator, self._peers, self._kernel, self._push = communicator, peers, kernel, push
        self.by_nccl = NcclAllReduce(communicator, add)
        self.most, self.largest = kernel.most, kernel.largest
        self.pushed = 0 if push is None else push.most

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        x = given[0]
        kernel = self._kernel_for(x.nbytes)
        if kernel is None:
            return self.by_nccl(*given)
        self._communicator.check()
        inputs, result = aligned(*given)
        kernel(inputs, result, current_stream(x.device))
        return [result]

    def _kernel_for(self, size: int) -> PreparedAllReduce | PreparedPush | None:
        """Return what adds so many bytes; None: NCCL does. Sizes are equal on all ranks, so all decide the same."""
        if size == 0 or size % VECTOR_BYTES:
            return None
        if size <= self.most:
            return self._kernel
        return self._push if size <= self.pushed else None


def _counts(call: PeerCall) -> str:
    return ", ".join(name for name in call.launches if name != "1")
