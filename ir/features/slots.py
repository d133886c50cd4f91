"""Where a sequence finds the state that stands once per sequence, and where it leaves it."""

import torch

from ingot.ir.features.asking import Array
from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import TensorType


def _read(array: Array, fed: Fed) -> None:
    array[:] = -1 if fed.state_read is None else fed.state_read


def _write(array: Array, fed: Fed) -> None:
    array[:] = -1 if fed.state_write is None else fed.state_write


# Two inputs, so that a step may leave alone what it read: the prefix cache keeps it.
SLOTS = Feature(
    "slots",
    inputs=(
        StepInput("state_read", TensorType(torch.int32, ("B",)), -1, _read),  # -1: it has none yet
        StepInput("state_write", TensorType(torch.int32, ("B",)), -1, _write),
    ),
)
