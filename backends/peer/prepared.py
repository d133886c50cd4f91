"""The launches of the peer backend's kernels, prepared for sums of any size."""

from collections.abc import Sequence

import torch

from ingot.backends.peer.layout import (
    BLOCKS,
    PUSH_CHUNK_BYTES,
    SLOT_BYTES,
    TILE_BYTES,
    TIMEOUT_MICROSECONDS,
    VECTOR_BYTES,
)
from ingot.backends.peer.memory import PeerMemory
from ingot.backends.peer.sizes import MOST_BYTES, MOST_PUSHED_BYTES
from ingot.backends.torch_cuda import current_stream
from ingot.backends.triton.launches import WARP, Launch
from ingot.backends.triton.prepared_launch import PreparedLaunch
from ingot.ir.errors import InternalError


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
        fixed = {"own": peers.own, "shared": peers.table.data_ptr(), "words": peers.words.data_ptr()}
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


class PreparedPush:
    """The launches of the kernel of two ranks for many bytes.

    peers         the shared memory
    launch        the launch
    function      the kernel, a function of the CUDA driver
    programs      the most programs of a launch: all must run at once
    chunk_bytes   the most bytes of a chunk, for which the kernel was compiled

    most          (attribute) the most bytes of a sum for which the kernel is chosen
    """

    def __init__(
        self, peers: PeerMemory, launch: Launch, function: object, programs: int, chunk_bytes: int = PUSH_CHUNK_BYTES
    ) -> None:
        fixed = {"shared": peers.table.data_ptr(), "words": peers.words.data_ptr()}
        self._launch = PreparedLaunch(launch, function, fixed, {"result": 0}, dependent=True)
        self._place, self._programs, self._chunk = peers.place, programs, chunk_bytes // VECTOR_BYTES
        self.most = MOST_PUSHED_BYTES
        self._bytes = 0  # of the last call
        self._stream: int | None = None

    def __call__(self, inputs: Sequence[torch.Tensor], result: torch.Tensor, stream: int) -> None:
        """Launch the kernel. All tensors are row-major, aligned to 16 bytes, and of whole vectors of 16 bytes."""
        if (size := result.nbytes) != self._bytes:
            vectors = size // VECTOR_BYTES
            blocks, chunk = divided(vectors, self._programs, self._chunk)
            sizes = {"blocks": blocks, "vectors": vectors, "chunk": chunk, "place": self._place}
            self._launch.resize({**sizes, "timeout": TIMEOUT_MICROSECONDS})
            self._bytes = size
        if stream != self._stream:
            self._launch.run_on(stream)
            self._stream = stream
        self._launch([one.data_ptr() for one in inputs], [result.data_ptr()])


def divided(vectors: int, programs: int, most: int) -> tuple[int, int]:
    """Divide vectors into chunks of at most `most` vectors, equally many for each program, as far as possible.

    `most` is a multiple of 32. Return the number of programs that have a chunk, and the vectors of a chunk: a multiple
    of 32, so that all threads of a warp have a vector or none.
    """
    rounds = -(-vectors // (programs * most))
    chunk = -(-vectors // (programs * rounds * WARP)) * WARP
    return min(programs, -(-vectors // chunk)), chunk


class PreparedAdd:
    """The launches of the kernel of one rank: the add of a residual to a sum that is there.

    launch     the launch for one rank
    function   the kernel, a function of the CUDA driver
    """

    def __init__(self, launch: Launch, function: object) -> None:
        self._launch = PreparedLaunch(launch, function, {}, {"result": 0}, dependent=True)

    def __call__(self, total: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the sum of two tensors of one shape, of whole vectors of 16 bytes."""
        inputs, result = aligned(total, residual)
        self._launch.resize({"blocks": -(-result.nbytes // TILE_BYTES), "vectors": result.nbytes // VECTOR_BYTES})
        self._launch.run_on(current_stream(result.device))
        self._launch([one.data_ptr() for one in inputs], [result.data_ptr()])
        return result


def aligned(*given: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return tensors as row-major ones, and a new one of their shape. Raises InternalError if one is not aligned."""
    inputs = [one.contiguous() for one in given]
    result = torch.empty_like(inputs[0])
    for one in (*inputs, result):
        if one.data_ptr() % VECTOR_BYTES:
            raise InternalError(
                f"the tensor of an all-reduce is at the address {one.data_ptr():#x}", expected="a multiple of 16"
            )
    return inputs, result
