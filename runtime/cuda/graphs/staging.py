"""Both ends of a captured step: inputs of as many rows as the graph has, and tokens, at addresses that never change, in
pinned memory that kernels read and write by themselves.

A copy by the driver inside a graph stands still for 7 to 12 us on either side of it on an H200, where the copy engines
and the multiprocessors wait for each other; a kernel that moves the same few kilobytes takes 2.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ingot.ir.features import StepInput
from ingot.runtime.cuda.graphs.device_view import device_view
from ingot.runtime.step import StepInputs, StepLayout, StepSizes


class PinnedInts:
    """i32 in pinned memory, zero at first: `host` as the processor sees it, `device` as kernels do."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        self.device = device_view(self.host, keep=True)


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let a kernel move i32 between pinned memory and the device, on the current stream."""
    torch.bitwise_or(source, 0, out=target)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, on its way on the current stream when this returns; `tensor` has been read by then.

    From pageable memory torch would wait for the stream, and so for the step that runs. The pinned copy goes back to
    torch's allocator, which does not give it out again before the device has read it.
    """
    return tensor.pin_memory().to(device, non_blocking=True)


class PaddedInputs:
    """The inputs of `layout` of steps of these sizes or smaller ones on the host, in `memory`: padding at first, to be
    filled."""

    def __init__(self, layout: StepLayout, sizes: StepSizes, memory: torch.Tensor | None = None) -> None:
        self.layout = layout
        self.sizes = sizes
        self.memory = torch.empty(layout.words(sizes), dtype=torch.int32) if memory is None else memory
        arrays = {name: view.numpy() for name, view in layout.views(self.memory, sizes).items()}
        self._all = [(one, arrays[one.name]) for one in layout.inputs if not one.late]
        self._late = [(one, arrays[one.name]) for one in layout.late]
        self._varying = [(one, arrays[one.name]) for one in layout.varying]
        self._filled = dict.fromkeys("TBLG", 0)
        self._stamp: object = None
        for one, array in (*self._all, *self._late):
            array[...] = one.padding

    def fill(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Copy the inputs of a step; the rest of each input becomes padding. Inputs that the layout has not are left
        out."""
        stamp: object = None
        arrays: Mapping[str, np.ndarray]
        if isinstance(inputs, StepInputs):
            stamp, arrays, counts = inputs.stamp, inputs.arrays, _counts(inputs.sizes)
        else:
            arrays = {name: value.numpy() for name, value in inputs.items()}
            counts = {one.dim: arrays[one.name].shape[0] for one, _ in (*self._all, *self._late)}
        fields: list[tuple[StepInput, np.ndarray]]
        fields = self._varying if stamp is not None and stamp == self._stamp else self._all
        if not isinstance(inputs, StepInputs):
            fields = [*fields, *self._late]  # they are all there
        self._stamp = stamp
        for one, array in fields:
            given, count = arrays[one.name], counts[one.dim]
            if given.ndim == 2:
                array[:count, : given.shape[1]] = given  # what stands past the width of a step is not read
            else:
                array[:count] = given
            if count < (filled := self._filled[one.dim]):
                array[count:filled] = one.padding
        self._filled = {**self._filled, **counts}

    def fill_late(self, inputs: StepInputs) -> None:
        """Take the late inputs of the step whose others were taken last."""
        counts = _counts(inputs.sizes)
        for one, array in self._late:
            count = counts[one.dim]
            array[:count] = inputs.arrays[one.name]
            array[count:] = one.padding

    def sent(self, device: torch.device) -> dict[str, torch.Tensor]:
        """A copy on a device, by name."""
        return self.layout.views(to_device(self.memory, device), self.sizes)


def _counts(sizes: StepSizes) -> dict[str, int]:
    return {"T": sizes.T, "B": sizes.B, "L": sizes.L, "G": sizes.G}


class DeviceInputs:
    """The inputs of steps of these sizes, padding at first. `views` are the inputs by name, all parts of `flat`."""

    def __init__(self, layout: StepLayout, sizes: StepSizes, device: torch.device) -> None:
        self.layout = layout
        self.sizes = sizes
        self.flat = PaddedInputs(layout, sizes).memory.to(device)
        self.views = layout.views(self.flat, sizes)


class HostInputs(PaddedInputs):
    """Those in pinned memory, `flat`."""

    def __init__(self, layout: StepLayout, sizes: StepSizes) -> None:
        self.flat = PinnedInts([layout.words(sizes)])
        super().__init__(layout, sizes, self.flat.host)
