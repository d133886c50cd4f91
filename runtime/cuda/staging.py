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


class DeviceInputs:
    """The inputs of decode steps of up to `rows` sequences and `pages` entries of the page table each, padding at
    first. `views` are the inputs by name, all parts of `flat`."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        self.rows = rows
        self.sizes = StepSizes(T=rows, B=rows, L=rows, P=pages)
        self.flat = HostInputs(self.sizes).flat.to(device)
        self.views = step_views(self.flat, self.sizes)


class HostInputs:
    """The same in pinned memory, `flat`, for the host to fill."""

    def __init__(self, sizes: StepSizes) -> None:
        self.flat = torch.zeros(step_words(sizes), dtype=torch.int32, pin_memory=True)
        self._arrays = {name: view.numpy() for name, view in step_views(self.flat, sizes).items()}
        self._filled = 0
        for name, array in self._arrays.items():
            array[...] = _PADDING[name]

    def fill(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Take the inputs of a step, one token for each sequence; rows behind them are padding again."""
        count = inputs["rows"].shape[0]
        for name, _, _ in STEP_FIELDS:
            array = self._arrays[name]
            if name in inputs:
                given: np.ndarray = inputs[name].numpy()
                if name == "page_table":
                    array[:count, : given.shape[1]] = given  # nobody reads what stands behind
                else:
                    array[:count] = given
            if count < self._filled:
                array[count : self._filled] = _PADDING[name]
        self._filled = count
