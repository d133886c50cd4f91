"""Buffers for the inputs and outputs of captured steps, at fixed addresses in pinned host memory that kernels access
directly. Inputs are padded to the sizes of the graph.

On an H200, a driver copy inside a graph adds 7 to 12 us of idle time on each side, because copy engines and
multiprocessors wait for each other. A kernel that moves the same few kilobytes takes 2 us.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ingot.ir.features import StepInput
from ingot.runtime.cuda.graphs.device_view import device_view
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes


class PinnedInts:
    """An i32 tensor in pinned host memory, as two views of that memory. `host` is for the CPU, `device` for GPU
    kernels. Initially it is zero."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        self.device = device_view(self.host, keep=True)


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the i32 tensor `source` to `target` by a kernel on the current stream. Either may be in pinned host memory,
    because kernels can access it."""
    torch.bitwise_or(source, 0, out=target)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy a host tensor to a GPU on the current stream, and return the copy. The caller may change `tensor`
    at once.

    The copy goes through pinned memory, so it does not wait for the running step. torch's allocator reuses pinned
    memory only after the GPU has read it.
    """
    return tensor.pin_memory().to(device, non_blocking=True)


class PaddedInputs:
    """The inputs of a step on the host, padded to the numbers of tokens and sequences in `sizes`.

    Until `fill`, all of them are padding.

    layout   where each input is in the memory
    memory   the i32 tensor that holds them, of `layout.words(sizes)` elements; None: allocate it
    """

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
        """Copy the inputs of a step and pad each of them. Inputs that are not in the layout are ignored.

        Late inputs are left to `fill_late`: the host knows their values only after the forward pass has begun. A plain
        dict of tensors has them already, and they are copied.
        """
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
            fields = [*fields, *self._late]  # plain tensors include the late inputs
        self._stamp = stamp
        for one, array in fields:
            given, count = arrays[one.name], counts[one.dim]
            if given.ndim == 2:
                array[:count, : given.shape[1]] = given  # columns past the step's width are not read
            else:
                array[:count] = given
            if count < (filled := self._filled[one.dim]):
                array[count:filled] = one.padding
        self._filled = {**self._filled, **counts}

    def fill_late(self, inputs: StepInputs) -> None:
        """Copy the late inputs of a step and pad them. The host knows their values only after the step's forward pass
        has begun. Call it after `fill`, which copies all other inputs."""
        counts = _counts(inputs.sizes)
        for one, array in self._late:
            count = counts[one.dim]
            array[:count] = inputs.arrays[one.name]
            array[count:] = one.padding

    def sent(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Start to copy the padded inputs to a GPU, and return the copies by name."""
        return self.layout.views(to_device(self.memory, device), self.sizes)


def _counts(sizes: StepSizes) -> dict[str, int]:
    return {"T": sizes.T, "B": sizes.B, "L": sizes.L, "G": sizes.G}


class DeviceInputs:
    """The inputs of steps on the GPU, padded to `sizes`, in one i32 buffer `flat`. `views` has each input by name, as a
    view of the buffer. Initially all of them are padding."""

    def __init__(self, layout: StepLayout, sizes: StepSizes, device: torch.device) -> None:
        self.layout = layout
        self.sizes = sizes
        self.flat = PaddedInputs(layout, sizes).memory.to(device)
        self.views = layout.views(self.flat, sizes)


class HostInputs(PaddedInputs):
    """Padded inputs of a step in one buffer of pinned host memory, `flat`, which kernels read directly."""

    def __init__(self, layout: StepLayout, sizes: StepSizes) -> None:
        self.flat = PinnedInts([layout.words(sizes)])
        super().__init__(layout, sizes, self.flat.host)
