"""Copies of adapters to their slots on a GPU, while steps run."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ingot.runtime.adapters.host_adapter import HostAdapter, Places


class SlotCopies:
    """Copies one adapter at a time: a thread copies it to page-locked memory, and the GPU from there.

    That memory is allocated once, for one adapter. Page-locked memory for each of the host's adapters would be some
    gigabytes, which the machine cannot use for anything else.

    places   where the factors belong
    states   the states on the GPU, by name
    steps    the CUDA stream on which steps run
    """

    def __init__(self, places: Places, states: Mapping[str, torch.Tensor], steps: torch.cuda.Stream) -> None:
        self._states, self._steps = states, steps
        self._stream = torch.cuda.Stream(steps.device)
        self._staging = places.zeros(pinned=True)
        self._parts = places.split(self._staging)
        self._thread = ThreadPoolExecutor(1, "adapter-copies")
        self._slot = -1  # of the copy that is not complete; -1: none
        self._staged: Future[torch.Tensor] | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def busy(self) -> bool:
        """Whether a copy is not complete, so that none can begin."""
        return not self.finished(self._slot)

    def begin(self, adapter: HostAdapter, slot: int) -> None:
        """Begin to copy an adapter to a slot that no request uses. Call it only if no copy is incomplete."""
        self._slot, self._copied = slot, None
        self._staged = self._thread.submit(self._staging.copy_, adapter.factors)

    def finished(self, slot: int) -> bool:
        """Return whether the last copy to a slot is complete. Call this again until it is: it takes the copy on."""
        if slot != self._slot or slot < 0:
            return True
        if self._copied is None:
            if self._staged is None or not self._staged.done():
                return False
            self._staged.result()
            self._copied = self._copy(slot)
        if not self._copied.query():
            return False
        self._slot = -1
        return True

    def _copy(self, slot: int) -> torch.cuda.Event:
        """Start the copy from page-locked memory, and return the event of its end."""
        # The step in flight may still read the slot, for a sequence that has ended.
        self._stream.wait_stream(self._steps)
        with torch.cuda.stream(self._stream):
            for state, part in self._parts.items():
                self._states[state][slot].copy_(part, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return copied
