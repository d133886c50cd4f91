"""SHA-256 of JSON values, and of files in chunks, so that threads can share a large file and damage be located."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ingot.ir.json_text import dump_json

CHUNK_BYTES = 64 << 20  # part of the artifact's schema: a change needs a new SCHEMA_VERSION
_BLOCK_BYTES = 1 << 20  # the memory of one thread; hashlib releases the GIL for blocks of this size


def chunk_count(size: int) -> int:
    """Return the number of 64 MiB chunks in which a file of `size` bytes is hashed; 0 for an empty file."""
    return -(-size // CHUNK_BYTES)


def digest_chunk(path: Path, index: int) -> str:
    """Return the SHA-256, in hex, of chunk `index` of a file. A chunk has 64 MiB. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(index * CHUNK_BYTES)
        left = CHUNK_BYTES
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def digest_chunks(path: Path, threads: int | None = None) -> tuple[str, ...]:
    """Return the SHA-256, in hex, of each chunk of 64 MiB of a file.

    `threads` threads compute them. The default is one per core, at most eight. Raises OSError.
    """
    return digest_files([path], threads)[0]


def digest_files(paths: Sequence[Path], threads: int | None = None) -> list[tuple[str, ...]]:
    """Return the SHA-256, in hex, of each chunk of 64 MiB of each file in `paths`.

    `threads` threads compute them. The default is one per core, at most eight, because more are faster than the disk.
    Raises OSError.
    """
    counts = [chunk_count(path.stat().st_size) for path in paths]
    chunks = [(path, index) for path, count in zip(paths, counts, strict=True) for index in range(count)]
    digests = iter(digest_many(chunks, threads))
    return [tuple(next(digests) for _ in range(count)) for count in counts]


def digest_json(value: object) -> str:
    """Return the SHA-256, in hex, of a value as canonical JSON. Equal values have equal digests on all machines."""
    return hashlib.sha256(dump_json(value).encode()).hexdigest()


def digest_many(chunks: Sequence[tuple[Path, int]], threads: int | None = None) -> list[str]:
    """Return the SHA-256, in hex, of each chunk in `chunks`, in order. A chunk is (file, index of its 64 MiB).

    `threads` threads compute them. The default is one per core, at most eight. Raises OSError.
    """
    workers = min(threads or min(len(os.sched_getaffinity(0)), 8), max(len(chunks), 1))
    if workers == 1:
        return [digest_chunk(path, index) for path, index in chunks]
    with ThreadPoolExecutor(workers, thread_name_prefix="digest") as pool:
        return list(pool.map(digest_chunk, *zip(*chunks, strict=True)))
