"""Weights copied to a device: each byte of the files is read once, digested, and sent on from where it was read to.

A thread takes one chunk of a file at a time, since SHA-256 goes through a chunk in order. It reads a block into host
memory that the device can read, digests it there, starts the copy, and fills its other block meanwhile. Digesting is
the slowest of the three (1.4 GB/s a core), so the speed is that of as many cores as there are.
"""

import bisect
import contextlib
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ingot.ir.artifact.digest import CHUNK_BYTES
from ingot.ir.errors import ArtifactError, OptionError, TargetError
from ingot.ir.machine.load_context import Allocator, LoadContext
from ingot.runtime.artifact import Artifact, FileChunk
from ingot.runtime.weights import Place, files_of, weight_places

# Large enough that Python's share of a block (some 50 µs, one thread at a time) stays below that of digesting it (6 ms)
# with 16 threads; small, because pinning memory takes the driver some 0.3 s a GB: 16 MiB a thread.
BLOCK_BYTES = 8 << 20
MAX_THREADS = 16
# Of every tensor on the device: what cudaMalloc aligns to (CUDA C++ programming guide, "Device Memory Accesses"), and
# more than vector loads (16) and TMA descriptors (16, and 128 in shared memory) ask for.
ALIGNMENT = 256


class WeightCopy:
    """Every weight by name, `tensors`, on the device of `context`, of a mesh in the part of its rank. There is one
    allocation per file, and each weight starts at a multiple of 256 bytes. They hold anything until `run` has returned.

    `verify` compares the digests of the bytes that are copied with the manifest. `threads` read, digest and copy; by
    default one for each core that this process may use, 16 at most.

    Raises ArtifactError for a place that cannot be; OptionError when the device has no room.
    """

    def __init__(
        self,
        artifact: Artifact,
        context: LoadContext,
        *,
        verify: bool = True,
        threads: int | None = None,
    ) -> None:
        self._artifact, self._device, self._verify = artifact, context.device, verify
        self._threads = threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)
        places = weight_places(artifact, context.rank)
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
        """Copy; gives the tensors. Raises ArtifactError for damage and for a file that cannot be read."""
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
    """Bytes [begin, end) of a file, which go to the device's allocation for that file from `target` on."""

    begin: int
    end: int
    target: int


@dataclass(frozen=True)
class _Layout:
    """How a file's weights lie on the device: `spans` in the order of the file, `offsets` of places, bytes in all."""

    spans: tuple[_Span, ...]
    offsets: dict[Place, int]
    size: int


@dataclass(frozen=True)
class _Job:
    """A chunk to be read, and where its bytes go."""

    chunk: FileChunk
    layout: _Layout
    memory: torch.Tensor


def _layout(places: Sequence[Place]) -> _Layout:
    """Tensors in the order of the file, each aligned. Neighbours that need no gap between them are one span."""
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
    """Do all jobs on several threads; the digests that were found. Raises what the first that failed raised."""
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
    """Host memory that a copy may still be read from."""

    tensor: torch.Tensor
    bytes: memoryview
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until its last copy has been made."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass
class _Lane:
    """A thread's way to the device: two blocks, filled in turn, and a stream of its own on a GPU."""

    blocks: deque[_Block]
    stream: torch.cuda.Stream | None = field(default=None)

    def copy(self, artifact: Artifact, job: _Job, verify: bool) -> str:
        """Copy a chunk's weights; the SHA-256 of the chunk in hex, "" without `verify`. Raises OSError, and
        ArtifactError for a file that has become shorter."""
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
        """Start copying what the block holds of [begin, begin + size) of the file."""
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
    """A lane, whose copies have been made when it is left."""
    memory = mmap.mmap(-1, 2 * BLOCK_BYTES)
    with contextlib.suppress(OSError):  # a kernel without huge pages: pinning takes longer
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
    """Host memory locked in place, so that the device copies from it while the host goes on."""
    runtime = torch.cuda.cudart()
    if code := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise TargetError(
            f"the driver does not pin {memory.nbytes} bytes of host memory: CUDA error {code}",
            expected="a process that may lock memory",
            hint="raise the limit on locked memory (`ulimit -l`), or give the container more memory",
        )
    try:
        yield
    finally:
        runtime.cudaHostUnregister(memory.data_ptr())


def _fill(block: memoryview, descriptor: int, offset: int) -> bool:
    """Read as many bytes as the block has; False when the file ends before. Raises OSError."""
    while block:
        count = os.preadv(descriptor, [block], offset)
        if count == 0:
            return False
        block, offset = block[count:], offset + count
    return True


def _view(place: Place, layout: _Layout, memory: torch.Tensor) -> torch.Tensor:
    offset = layout.offsets[place]
    return memory[offset : offset + place.nbytes].view(place.dtype).view(place.shape)
