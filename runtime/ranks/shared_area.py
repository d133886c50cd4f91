"""The memory that the processes of a mesh share: what each rank reports, and the inputs of steps.

The memory has no name in the file system. Rank 0 makes it and hands its file descriptor to the other processes. It is
freed when the last process ends. Ranks report before rank 0 knows the sizes of a step, so slots are added later.
Numbers are little-endian 8-byte integers in fixed places, so nothing is serialized.
"""

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from ingot.ir.features.request_view import Array
from ingot.runtime.loading.phases import Span
from ingot.runtime.ranks.report_layout import TEXT_BYTES, WORDS, report_bytes

# The inputs of so many more steps than there are stages are kept, so that rank 0 can prepare a step while other ranks
# run the ones before.
_MORE_SLOTS = 3
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


class SharedArea:
    """The shared memory of a mesh. First it has what ranks report; `add_slots` adds the slots of steps.

    ranks        the number of ranks
    fd           the file descriptor of the memory, which has `report_bytes` bytes or more. None: make new memory. The
                 caller closes it, in the attribute `fd`
    stages       (attribute) the number of pipeline stages
    slots        (attribute) the number of slots; 0 before they are added
    """

    def __init__(self, ranks: int, fd: int | None = None) -> None:
        self.stages, self.slots = 1, 0
        numbers, self._start = ranks * WORDS * 8, report_bytes(ranks)
        self.fd = os.memfd_create("ingot-ranks") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self._start)
        memory = mmap.mmap(self.fd, self._start)
        self._reports = np.frombuffer(memory, np.int64, ranks * WORDS).reshape(ranks, WORDS)
        self._texts = np.frombuffer(memory, np.uint8, ranks * TEXT_BYTES, numbers).reshape(ranks, TEXT_BYTES)

    def add_slots(self, words: int, stages: int) -> None:
        """Add the slots, each of so many 4-byte words. It holds the inputs of one step. All processes must call it with
        equal numbers, rank 0's first."""
        self.stages, self.slots = stages, stages + _MORE_SLOTS
        size = self.slots * words * 4
        if os.fstat(self.fd).st_size < self._start + size:
            os.ftruncate(self.fd, self._start + size)  # untouched pages take no memory
        memory = mmap.mmap(self.fd, size, offset=self._start)
        self._slots = torch.frombuffer(memory, dtype=torch.int32).view(self.slots, words)

    def slot(self, step: int) -> torch.Tensor:
        """Return the slot of the step with this number, i32[slot_words]. Step n + slots uses it again."""
        return self._slots[step % self.slots]

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
        written = json.dumps(content).encode()
        self._texts[rank, : len(written)] = np.frombuffer(written, np.uint8)
        self._texts[rank, len(written)] = 0

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
    def done(self) -> Array:
        """The number of steps that each rank has ended; rank 0 does not count."""
        return self._reports[:, _DONE]

    @property
    def busy(self) -> Array:
        """The nanoseconds that each rank has computed; rank 0 counts its own elsewhere."""
        return self._reports[:, _BUSY]

    def beat(self, rank: int) -> None:
        """Report that a rank's process runs."""
        self._reports[rank, _BEATS] += 1

    def beats(self, rank: int) -> int:
        return int(self._reports[rank, _BEATS])
