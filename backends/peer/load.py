"""The peer backend at run time: launches the kernel of an all-reduce and a residual add, on torch's current stream."""

import logging
from collections.abc import Callable, Sequence
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
from ingot.backends.peer.sizes import MOST_BYTES
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
    """Load a call, and return a function from this rank's tensors to a list with the result. All ranks must load it.

    NCCL computes the all-reduce if a rank cannot reach the memory of another one, or if there is no kernel for so many
    ranks; a warning says so. It also computes sums of more bytes than the kernel does best. All ranks decide the same.

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
        peers = shared_memory(communicator, context.device)
    if launch is None or peers is None:
        return NcclAllReduce(communicator, add)
    cores = torch.cuda.get_device_properties(context.device).multi_processor_count
    kernel = PreparedAllReduce(peers, launch, function_of(launch), cores)
    return PeerAllReduce(communicator, peers, kernel, add)


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
    cores      the GPU's multiprocessors: all blocks of a launch must run at once

    largest    (attribute) the most bytes of a sum for which there is memory
    most       (attribute) the most bytes of a sum for which the kernel is chosen
    """

    def __init__(self, peers: PeerMemory, launch: Launch, function: object, cores: int) -> None:
        fixed = {"shared": peers.table.data_ptr(), "words": peers.words.data_ptr()}
        self._launch = PreparedLaunch(launch, function, fixed, {"result": 0}, dependent=True)
        self._place, self._blocks = peers.place, min(BLOCKS, cores)
        self.largest = self._blocks * SLOT_BYTES
        self.most = min(self.largest, MOST_BYTES[peers.size])
        self._bytes = 0  # of the last call
        self._stream: int | None = None

    def __call__(self, inputs: Sequence[torch.Tensor], result: torch.Tensor, stream: int) -> None:
        """Launch the kernel. All tensors are row-major, aligned to 16 bytes, and of whole vectors of 16 bytes."""
        if (size := result.nbytes) != self._bytes:
            blocks = min(self._blocks, -(-size // TILE_BYTES))
            sizes = {"blocks": blocks, "vectors": size // VECTOR_BYTES, "place": self._place}
            self._launch.resize({**sizes, "timeout": TIMEOUT_MICROSECONDS})
            self._bytes = size
        if stream != self._stream:
            self._launch.run_on(stream)
            self._stream = stream
        self._launch([one.data_ptr() for one in inputs], [result.data_ptr()])


class PreparedAdd:
    """The launches of the kernel of one rank: the add of a residual to a sum that is there.

    launch     the launch for one rank
    function   the kernel, a function of the CUDA driver
    """

    def __init__(self, launch: Launch, function: object) -> None:
        self._launch = PreparedLaunch(launch, function, {}, {"result": 0}, dependent=True)

    def __call__(self, total: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the sum of two tensors of one shape, of whole vectors of 16 bytes."""
        inputs, result = _aligned(total, residual)
        self._launch.resize({"blocks": -(-result.nbytes // TILE_BYTES), "vectors": result.nbytes // VECTOR_BYTES})
        self._launch.run_on(current_stream(result.device))
        self._launch([one.data_ptr() for one in inputs], [result.data_ptr()])
        return result


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
    """An all-reduce, and the add of a residual, if any: of few bytes by the kernel, and of many through NCCL.

    communicator   connects the ranks through NCCL
    peers          the shared memory
    kernel         launches the kernel
    add            launches the add after an all-reduce by NCCL; None: there is no residual

    most      (attribute) the most bytes of a sum for which the kernel is chosen
    largest   (attribute) the most bytes of a sum that the kernel can compute
    by_nccl   (attribute) computes the same for any size
    """

    def __init__(
        self,
        communicator: NcclCommunicator,
        peers: PeerMemory,
        kernel: PreparedAllReduce,
        add: PreparedAdd | None = None,
    ) -> None:
        self._communicator, self._peers, self._kernel = communicator, peers, kernel
        self.by_nccl = NcclAllReduce(communicator, add)
        self.most, self.largest = kernel.most, kernel.largest

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        x = given[0]
        # Sizes are equal on all ranks, so all take one way.
        if not 0 < x.nbytes <= self.most or x.nbytes % VECTOR_BYTES:
            return self.by_nccl(*given)
        self._communicator.check()
        inputs, result = _aligned(*given)
        self._kernel(inputs, result, current_stream(x.device))
        return [result]


def _aligned(*given: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return tensors as row-major ones, and a new one of their shape. Raises InternalError if one is not aligned."""
    inputs = [one.contiguous() for one in given]
    result = torch.empty_like(inputs[0])
    for one in (*inputs, result):
        if one.data_ptr() % VECTOR_BYTES:
            raise InternalError(
                f"the tensor of an all-reduce is at the address {one.data_ptr():#x}", expected="a multiple of 16"
            )
    return inputs, result


def _counts(call: PeerCall) -> str:
    return ", ".join(name for name in call.launches if name != "1")
