"""A decode step's inputs for a captured graph: as many rows as the graph has, at addresses that never change."""

from collections.abc import Mapping

import numpy as np
import torch

from ingot.runtime.batch import NOTHING_ASKED
from ingot.runtime.step import STEP_FIELDS, StepSizes, step_views, step_words

# What a row of a step holds that no sequence has; `feed` and `advance` know it (ingot.ir.ops.step).
_PADDING: Mapping[str, float] = {
    "tokens": 0,
    "token_seqs": -1,
    "q_starts": 0,
    "q_lens": 0,
    "rows": -1,
    "starts": 0,
    "state_read": -1,
    "state_write": -1,
    "sample_index": -1,
    "prompt_ends": -1,
    "page_table": 0,
    "logit_rows": 0,
    **NOTHING_ASKED,
}
# Steps whose inputs may be on their way at once: the one that runs, and the one that is prepared meanwhile.
_IN_FLIGHT = 2


class DecodeStaging:
    """The inputs of decode steps of up to `rows` sequences and `pages` entries of the page table each.

    `views` are the inputs on the device, by name: what a graph is captured with.
    """

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        self.rows = rows
        self.sizes = StepSizes(T=rows, B=rows, L=rows, P=pages)
        words = step_words(self.sizes)
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self.views = step_views(self._device, self.sizes)
        self._hosts = [_Host(words, self.sizes) for _ in range(_IN_FLIGHT)]
        self._turn = 0
        self._device.copy_(self._hosts[0].flat)

    def fill(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Send the inputs of a step of at most `rows` sequences to the device, on the current stream."""
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % _IN_FLIGHT
        host.sent.synchronize()  # the step before last took its inputs from there
        host.fill(inputs)
        self._device.copy_(host.flat, non_blocking=True)
        host.sent.record()


class _Host:
    """A pinned buffer, all of it padding at first."""

    def __init__(self, words: int, sizes: StepSizes) -> None:
        self.flat = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        self.sent = torch.cuda.Event()
        self._arrays = {name: view.numpy() for name, view in step_views(self.flat, sizes).items()}
        self._filled = 0
        for name, array in self._arrays.items():
            array[...] = _PADDING[name]

    def fill(self, inputs: Mapping[str, torch.Tensor]) -> None:
        count = inputs["rows"].shape[0]
        for name, _, _ in STEP_FIELDS:
            given: np.ndarray = inputs[name].numpy()
            array = self._arrays[name]
            if name == "page_table":
                array[:count, : given.shape[1]] = given  # nobody reads what stands behind
            else:
                array[:count] = given
            if count < self._filled:
                array[count : self._filled] = _PADDING[name]
        self._filled = count
