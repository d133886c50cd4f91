"""The copy of weights to a device: each byte of the files is read once into pinned memory, hashed there, and copied.

Each thread takes one chunk of a file at a time, because SHA-256 needs the bytes of a chunk in order. It reads a block
into pinned host memory, hashes it, starts the copy, and fills its other block during the copy. Hashing is the slowest
part (1.4 GB/s per core), so the speed grows with the number of cores.
"""

import bisect
import contextlib
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ingot.ir.artifact.digest import CHUNK_BYTES
from ingot.ir.errors import ArtifactError, OptionError, TargetError
from ingot.ir.machine.load_context import Allocator, LoadContext
from ingot.ir.mesh import world_size
from ingot.runtime.loading.artifact import Artifact, FileChunk
from ingot.runtime.loading.weights import Place, files_of, weight_places

# Large enough that with 16 threads the Python time of a block (some 50 µs, one thread at a time) stays below its
# hashing time (6 ms). Small, because pinning takes the driver some 0.3 s per GB, and each thread pins 16 MiB.
BLOCK_BYTES = 8 << 20
MAX_THREADS = 16
# Alignment of every tensor on the device, in bytes: that of cudaMalloc (CUDA C++ programming guide, "Device Memory
# Accesses"). Vector loads (16) and TMA descriptors (16, and 128 in shared memory) need less.
ALIGNMENT = 256


class WeightCopy:
    """Copies all weights of an artifact to a GPU. The constructor allocates them as `tensors`, by name. `run` copies
    their values.

    context   the GPU, its allocator, and the rank (this device, if there are several). Of a sharded weight, only the
              shard of the rank is copied
    names     the weights that the rank needs, on a mesh; None: all
    verify    compare the digests of the copied bytes with the manifest
    threads   number of threads that read, hash and copy; default: one per core that this process may use, at most 16.
              The ranks of a mesh divide the cores

    Each file has one allocation, in which each weight starts at a multiple of 256 bytes. Raises ArtifactError if
    weights.json is wrong; OptionError if the GPU has no memory for the weights.
    """

    def __init__(
        self,
        artifact: Artifact,
        context: LoadContext,
        *,
        names: Collection[str] | None = None,
        verify: bool = True,
        threads: int | None = None,
    ) -> None:
        self._artifact, self._device, self._verify = artifact, context.device, verify
        cores = len(os.sched_getaffinity(0)) // world_size(context.mesh)
        self._threads = threads or min(max(1, cores), MAX_THREADS)
        places = weight_places(artifact, context.rank)
        if names is not None:
            places = {name: place for name, place in places.items() if name in names}
        self._files = files_of(artifact, places, context.rank)
        self._layouts = {
            file: _layout([place for place in places.values() if place.file == file]) for file in self._files
        }
        self._memory = {file: _allocate(layout.size, context.allocator) for file, layout in self._layouts.items()}
        tensors = {
            place: _view(place, self._layouts[place.file], self._memory[place.file]) for place in places.values()
        }
        self.tensors = {name: tensors[place] for name, place in places.items()}

    def run(self) -> dict[str, torch.Tensor]:
        """Copy the weights from their files and return the tensors by name. Raises ArtifactError for a damaged or
        unreadable file."""
        artifact = self._artifact
        jobs = [
            _Job(chunk, self._layouts[chunk[0].path], self._memory[chunk[0].path])
            for chunk in artifact.chunks(self._files)
        ]
        try:
            found = _copy_all(artifact, jobs, self._device, self._verify, self._threads)
        except OSError as error:
            raise artifact.unreadable(error) from error
        if self._verify:
            artifact.check_digests(found)
        return self.tensors


@dataclass(frozen=True)
class _Span:
    """Bytes [begin, end) of a weight file that are copied together. `target` is the offset of their copy in the file's
    GPU allocation."""

    begin: int
    end: int
    target: int


@dataclass(frozen=True)
class _Layout:
    """Where the weights of one file are in the file's GPU allocation.

    spans     the ranges of bytes to copy, in file order
    offsets   the offset of each weight in the allocation; the key is its place (file, offset, size) in the artifact
    size      the bytes of the allocation
    """

    spans: tuple[_Span, ...]
    offsets: dict[Place, int]
    size: int


@dataclass(frozen=True)
class _Job:
    """One unit of work of a copying thread.

    chunk    the chunk of a weight file to copy
    layout   where the file's weights are in the GPU allocation
    memory   the GPU allocation
    """

    chunk: FileChunk
    layout: _Layout
    memory: torch.Tensor


def _layout(places: Sequence[Place]) -> _Layout:
    """Return where to put the weights of one file in the file's GPU allocation. They are in file order, and each is
    aligned. `places` are where the weights are in the file. Weights that are adjacent in the file and in the allocation
    are copied together."""
    spans: list[_Span] = []
    offsets: dict[Place, int] = {}
    size = 0
    for place in sorted(set(places), key=lambda place: (place.offset, place.end)):
        size = -(-size // ALIGNMENT) * ALIGNMENT
        offsets[place] = size
        last = spans[-1] if spans else None
        if last and (last.end, last.target + last.end - last.begin) == (place.offset, size):
            spans[-1] = _Span(last.begin, place.end, last.target)
        elif place.nbytes:
            spans.append(_Span(place.offset, place.end, size))
        size += place.nbytes
    return _Layout(tuple(spans), offsets, size)


def _allocate(size: int, allocator: Allocator) -> torch.Tensor:
    try:
        return allocator.empty([size], torch.uint8)
    except MemoryError as error:
        raise OptionError(
            f"{size} bytes of weights do not fit onto the GPU: {error}",
            expected="memory that no other process takes while loading",
            hint="end the other process, or take another GPU",
        ) from error


def _copy_all(
    artifact: Artifact, jobs: Sequence[_Job], device: torch.device, verify: bool, threads: int
) -> dict[FileChunk, str]:
    """Copy the chunks of all jobs, on `threads` threads. Return the SHA-256 of each chunk in hex; without `verify`, ""
    for each. Raises the first error of a thread."""
    waiting = deque(jobs)
    found: dict[FileChunk, str] = {}

    def work() -> None:
        with _lane(device) as lane:
            while waiting:
                try:
                    job = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                found[job.chunk] = lane.copy(artifact, job, verify)

    def work_or_stop_all() -> None:
        try:
            work()
        except BaseException:
            waiting.clear()
            raise

    count = max(1, min(threads, len(jobs)))
    with ThreadPoolExecutor(count, thread_name_prefix="weights") as pool:
        for done in [pool.submit(work_or_stop_all) for _ in range(count)]:
            done.result()
    return {job.chunk: found[job.chunk] for job in jobs}


@dataclass
class _Block:
    """A block of pinned host memory through which weights are copied. `tensor` and `bytes` are two views of it. The
    event `copied` is recorded after each copy from it; None: there was no copy."""

    tensor: torch.Tensor
    bytes: memoryview
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the last copy from the block is complete."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass
class _Lane:
    """The buffers of one copying thread: two blocks of host memory, filled in turn. `stream` is the CUDA stream of the
    copies; None on a CPU."""

    blocks: deque[_Block]
    stream: torch.cuda.Stream | None = field(default=None)

    def copy(self, artifact: Artifact, job: _Job, verify: bool) -> str:
        """Copy the weights in one chunk of a weight file to the GPU. Return the chunk's SHA-256 in hex, or "" without
        `verify`. Raises OSError, or ArtifactError if the file is shorter than the manifest says."""
        entry, index = job.chunk
        begin = index * CHUNK_BYTES
        end = min(begin + CHUNK_BYTES, entry.size)
        digest = hashlib.sha256()
        with artifact.file(entry.path).open("rb", buffering=0) as file:
            for place in range(begin, end, BLOCK_BYTES):
                block = self.blocks[0]
                self.blocks.rotate()
                block.wait()
                held = block.bytes[: min(BLOCK_BYTES, end - place)]
                if not _fill(held, file.fileno(), place):
                    raise ArtifactError(f"{entry.path} ends before byte {entry.size}", where=str(artifact.folder))
                if verify:
                    digest.update(held)
                self._send(block, place, len(held), job)
        return digest.hexdigest() if verify else ""

    def _send(self, block: _Block, begin: int, size: int, job: _Job) -> None:
        """Start to copy the weights in `block` to the GPU. The block has bytes [begin, begin + size) of the job's
        file."""
        spans = job.layout.spans
        first = max(0, bisect.bisect_right(spans, begin, key=lambda span: span.begin) - 1)
        for span in spans[first:]:
            if span.begin >= begin + size:
                break
            low, high = max(span.begin, begin), min(span.end, begin + size)
            if low < high:
                target = span.target + low - span.begin
                job.memory[target : target + high - low].copy_(
                    block.tensor[low - begin : high - begin], non_blocking=True
                )
        if self.stream is not None:
            block.copied = self.stream.record_event(block.copied)


@contextlib.contextmanager
def _lane(device: torch.device) -> Iterator[_Lane]:
    """Yield the buffers of one copying thread. At the end of the `with` block, wait for all copies from these
    buffers."""
    memory = mmap.mmap(-1, 2 * BLOCK_BYTES)
    with contextlib.suppress(OSError):  # an operating system without huge pages: pinning takes longer
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    view = memoryview(memory)
    places = (slice(0, BLOCK_BYTES), slice(BLOCK_BYTES, 2 * BLOCK_BYTES))
    lane = _Lane(deque(_Block(tensor[place], view[place]) for place in places))
    if device.type != "cuda":
        yield lane
        return
    with torch.cuda.device(device), _pinned(tensor):
        lane.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(lane.stream):
            try:
                yield lane
            finally:
                lane.stream.synchronize()


@contextlib.contextmanager
def _pinned(memory: torch.Tensor) -> Iterator[None]:
    """Pin host memory inside the `with` block, so that the GPU can copy from it while the host continues. Raises
    TargetError if the driver cannot pin it."""
    runtime = torch.cuda.cudart()
    if code := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise TargetError(
            f"the driver cannot pin {memory.nbytes} bytes of host memory: CUDA error {code}",
            expected="a process that may lock memory",
            hint="raise the limit on locked memory (`ulimit -l`), or give the container more memory",
        )
    try:
        yield
    finally:
        runtime.cudaHostUnregister(memory.data_ptr())


def _fill(block: memoryview, descriptor: int, offset: int) -> bool:
    """Fill `block` from an open file. `descriptor` is the file, and `offset` the first byte to read. Return False if
    the file ends before the block is full. Raises OSError."""
    while block:
        count = os.preadv(descriptor, [block], offset)
        if count == 0:
            return False
        block, offset = block[count:], offset + count
    return True


def _view(place: Place, layout: _Layout, memory: torch.Tensor) -> torch.Tensor:
    offset = layout.offsets[place]
    return memory[offset : offset + place.nbytes].view(place.dtype).view(place.shape)
