"""The reports of the ranks of a mesh, in memory that their processes share. Importing this imports no torch.

Numbers are little-endian 8-byte integers in fixed places, so nothing is serialized. The process that relays reports to
rank 0's host reads and writes them as bytes.
"""

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.runtime.loading.phases import Span
from ingot.runtime.ranks.report_layout import TEXT_BYTES, WORDS, report_bytes

# How often a rank reports that its process runs.
BEAT_SECONDS = 0.5
# Phases in the text of a rank, of some 60 bytes each. Loading has 15.
_MOST_SPANS = 80
_STATE, _DONE, _BEATS, _BUSY, _FREE = range(WORDS)


class RankState(IntEnum):
    """The state that a rank reports: it loads; it is ready; it failed; it failed because another rank is gone."""

    LOADING = 0
    READY = 1
    FAILED = 2
    LOST = 3


class Reports:
    """The reports of the ranks of a mesh, at the beginning of shared memory.

    ranks   the number of ranks
    fd      the file descriptor of the memory, which has `report_bytes` bytes or more. None: make new memory. The
            caller closes it, in the attribute `fd`
    """

    def __init__(self, ranks: int, fd: int | None = None) -> None:
        numbers, self._start = ranks * WORDS * 8, report_bytes(ranks)
        self.fd = os.memfd_create("ingot-ranks") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self._start)
        memory = mmap.mmap(self.fd, self._start)
        self._reports = np.frombuffer(memory, np.int64, ranks * WORDS).reshape(ranks, WORDS)
        self._texts = np.frombuffer(memory, np.uint8, ranks * TEXT_BYTES, numbers).reshape(ranks, TEXT_BYTES)

    def state(self, rank: int) -> RankState:
        return RankState(int(self._reports[rank, _STATE]))

    def set_state(self, rank: int, state: RankState) -> None:
        self._reports[rank, _STATE] = state

    def fail(self, rank: int, state: RankState, texts: Mapping[str, str]) -> None:
        """Report that a rank has failed. `texts` are the parts of its error, such as "what"."""
        self._write(rank, {name: text[:1000] for name, text in texts.items()})
        self.set_state(rank, state)

    def ready(self, rank: int, spans: Sequence[Span]) -> None:
        """Report that a rank is ready. `spans` are the phases of its loading; those beyond the last are left out."""
        self._write(rank, [(one.name, round(one.begin, 6), round(one.end, 6)) for one in spans[:_MOST_SPANS]])
        self.set_state(rank, RankState.READY)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the phases of the loading of a rank that is ready."""
        return tuple(Span(*one) for one in self._read(rank))

    def _write(self, rank: int, content: object) -> None:
        self._put(rank, json.dumps(content).encode())

    def _put(self, rank: int, text: bytes) -> None:
        self._texts[rank, : len(text)] = np.frombuffer(text, np.uint8)
        self._texts[rank, len(text)] = 0

    def _read(self, rank: int) -> Any:
        return json.loads(self._texts[rank].tobytes().split(b"\0", 1)[0])

    def failure(self, rank: int) -> Mapping[str, str]:
        """Return the parts of the error of a rank that has failed."""
        found: Mapping[str, str] = self._read(rank)
        return found

    def tell_free(self, rank: int, size: int) -> None:
        """Report how many bytes are free on a rank's GPU, in its context. It is above 0."""
        self._reports[rank, _FREE] = size

    def free(self, rank: int) -> int:
        """Return the bytes that are free on a rank's GPU; 0 if the rank has not reported them yet."""
        return int(self._reports[rank, _FREE])

    @property
    def done(self) -> npt.NDArray[np.int64]:
        """The number of steps that each rank has ended; rank 0 does not count."""
        return self._reports[:, _DONE]

    @property
    def busy(self) -> npt.NDArray[np.int64]:
        """The nanoseconds that each rank has computed; rank 0 counts its own elsewhere."""
        return self._reports[:, _BUSY]

    def beat(self, rank: int) -> None:
        """Report that a rank's process runs."""
        self._reports[rank, _BEATS] += 1

    def beats(self, rank: int) -> int:
        return int(self._reports[rank, _BEATS])

    def numbers(self, rank: int) -> bytes:
        """Return all numbers that a rank has reported, as bytes."""
        found: bytes = self._reports[rank].tobytes()
        return found

    def text(self, rank: int) -> bytes:
        """Return the text of a rank that is ready or has failed, as bytes; of another one, b""."""
        text: bytes = self._texts[rank].tobytes().split(b"\0", 1)[0]
        return b"" if self.state(rank) is RankState.LOADING else text

    def copy(self, rank: int, numbers: bytes, text: bytes) -> None:
        """Write what `numbers` and `text` have returned in another process, on another host."""
        if text:
            self._put(rank, text)  # before the state that says it is there
        self._reports[rank] = np.frombuffer(numbers, np.int64)
