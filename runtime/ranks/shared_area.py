"""The memory that the processes of a mesh share: what each rank reports, and the inputs of steps.

The memory has no name in the file system. Rank 0 makes it and hands its file descriptor to the other processes. It is
freed when the last process ends. Numbers are little-endian 8-byte integers in fixed places, so nothing is serialized.
"""

import json
import mmap
import os
from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import torch

from ingot.ir.features.request_view import Array

# The inputs of so many more steps than there are stages are kept, so that rank 0 can prepare a step while other ranks
# run the ones before.
_MORE_SLOTS = 3
# How often a rank reports that its process runs.
BEAT_SECONDS = 0.5
_WORDS = 4  # numbers that each rank reports
_STATE, _DONE, _BEATS, _BUSY = range(4)
_TEXT_BYTES = 1 << 13


class RankState(IntEnum):
    """The state that a rank reports: it loads; it is ready; it failed; it failed because another rank is gone."""

    LOADING = 0
    READY = 1
    FAILED = 2
    LOST = 3


class SharedArea:
    """The shared memory of a mesh.

    ranks        the number of ranks
    slot_words   the 4-byte words of a slot, which holds the inputs of one step
    fd           the file descriptor of the memory, which another process made; it is closed. None: make new memory, and
                 leave its descriptor in the attribute `fd`, for other processes
    stages       the number of pipeline stages
    slots        (attribute) the number of slots
    """

    def __init__(self, ranks: int, slot_words: int, fd: int | None = None, *, stages: int = 1) -> None:
        self.stages, self.slots = stages, stages + _MORE_SLOTS
        reports, texts = ranks * _WORDS * 8, ranks * _TEXT_BYTES
        size = reports + texts + self.slots * slot_words * 4
        self.fd = os.memfd_create("ingot-ranks") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)  # untouched pages take no memory
        self.memory = mmap.mmap(self.fd, size)
        if fd is not None:
            os.close(fd)
        self._reports = np.frombuffer(self.memory, np.int64, ranks * _WORDS).reshape(ranks, _WORDS)
        self._texts = np.frombuffer(self.memory, np.uint8, texts, reports).reshape(ranks, _TEXT_BYTES)
        start = reports + texts
        self._slots = torch.frombuffer(self.memory, dtype=torch.int32, offset=start).view(self.slots, slot_words)

    def slot(self, step: int) -> torch.Tensor:
        """Return the slot of the step with this number, i32[slot_words]. Step n + slots uses it again."""
        return self._slots[step % self.slots]

    def state(self, rank: int) -> RankState:
        return RankState(int(self._reports[rank, _STATE]))

    def set_state(self, rank: int, state: RankState) -> None:
        self._reports[rank, _STATE] = state

    def fail(self, rank: int, state: RankState, texts: Mapping[str, str]) -> None:
        """Report that a rank has failed. `texts` are the parts of its error, such as "what"."""
        written = json.dumps({name: text[:1000] for name, text in texts.items()}).encode()
        self._texts[rank, : len(written)] = np.frombuffer(written, np.uint8)
        self._texts[rank, len(written)] = 0
        self.set_state(rank, state)

    def failure(self, rank: int) -> Mapping[str, str]:
        """Return the parts of the error of a rank that has failed."""
        text = self._texts[rank].tobytes().split(b"\0", 1)[0]
        found: Mapping[str, str] = json.loads(text)
        return found

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
