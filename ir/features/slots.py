"""The step inputs that say which slots of per-sequence states (convolution, scan) a step reads and writes."""

import torch

from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import TensorType


def _read(array: Array, fed: Fed) -> None:
    array[:] = -1 if fed.state_read is None else fed.state_read


def _write(array: Array, fed: Fed) -> None:
    array[:] = -1 if fed.state_write is None else fed.state_write


# Two inputs, so that a step need not overwrite the slot that it read, which the prefix cache may keep.
SLOTS = Feature(
    "slots",
    inputs=(
        StepInput("state_read", TensorType(torch.int32, ("B",)), -1, _read),  # -1: the sequence has none yet
        StepInput("state_write", TensorType(torch.int32, ("B",)), -1, _write),
    ),
)
