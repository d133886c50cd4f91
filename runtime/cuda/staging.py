"""Both ends of a captured step: inputs of as many rows as the graph has, and tokens, at addresses that never change, in
pinned memory that kernels read and write by themselves.

A copy by the driver inside a graph stands still for 7 to 12 us on either side of it on an H200, where the copy engines
and the multiprocessors wait for each other; a kernel that moves the same few kilobytes takes 2.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ingot.runtime.batch import NOTHING_ASKED
from ingot.runtime.cuda.device_view import device_view
from ingot.runtime.step import STEP_FIELDS, VARYING, StepInputs, StepSizes, step_views, step_words

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
_VARYING = tuple(field for field in STEP_FIELDS if field[0] in VARYING)
# Inputs that tell a step's sizes.
_COUNTED: Mapping[str, str] = {"T": "tokens", "B": "rows", "L": "logit_rows"}


class PinnedInts:
    """i32 in pinned memory, zero at first: `host` as the processor sees it, `device` as kernels do."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        self.device = device_view(self.host, keep=True)


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let a kernel move i32 between pinned memory and the device, on the current stream."""
    torch.bitwise_or(source, 0, out=target)


class PaddedInputs:
    """The inputs of steps of these sizes or smaller ones on the host, in `memory`: padding at first, to be filled."""

    def __init__(self, sizes: StepSizes, memory: torch.Tensor | None = None) -> None:
        self.sizes = sizes
        self.memory = torch.empty(step_words(sizes), dtype=torch.int32) if memory is None else memory
        self._arrays = {name: view.numpy() for name, view in step_views(self.memory, sizes).items()}
        self._filled = {"T": 0, "B": 0, "L": 0}
        self._stamp: object = None
        for name, array in self._arrays.items():
            array[...] = _PADDING[name]

    def fill(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Take the inputs of a step; what is behind them is padding again."""
        stamp: object = None
        arrays: Mapping[str, np.ndarray]
        if isinstance(inputs, StepInputs):
            stamp, arrays = inputs.stamp, inputs.arrays
        else:
            arrays = {name: value.numpy() for name, value in inputs.items()}
        fields = _VARYING if stamp is not None and stamp == self._stamp else STEP_FIELDS
        self._stamp = stamp
        counts = {dim: arrays[name].shape[0] for dim, name in _COUNTED.items()}
        for name, _, (dim, *_) in fields:
            array, count = self._arrays[name], counts[str(dim)]
            if name in arrays:
                given = arrays[name]
                if name == "page_table":
                    array[:count, : given.shape[1]] = given  # nobody reads what stands behind
                else:
                    array[:count] = given
            if count < (filled := self._filled[str(dim)]):
                array[count:filled] = _PADDING[name]
        self._filled = counts

    def sent(self, device: torch.device) -> dict[str, torch.Tensor]:
        """A copy on a device, by name."""
        return step_views(self.memory.to(device), self.sizes)


class DeviceInputs:
    """The inputs of steps of these sizes, padding at first. `views` are the inputs by name, all parts of `flat`."""

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        self.sizes = sizes
        self.flat = PaddedInputs(sizes).memory.to(device)
        self.views = step_views(self.flat, sizes)


class HostInputs(PaddedInputs):
    """Those in pinned memory, `flat`."""

    def __init__(self, sizes: StepSizes) -> None:
        self.flat = PinnedInts([step_words(sizes)])
        super().__init__(sizes, self.flat.host)
