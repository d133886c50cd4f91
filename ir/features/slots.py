"""Where a sequence finds the state that stands once per sequence, and where it leaves it."""

import numpy as np
import torch

from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.step_input import Array, StepInput
from ingot.ir.types import TensorType


def _read(array: Array, fed: Fed) -> None:
    array[:] = np.where(fed.begins, -1, fed.rows)


def _write(array: Array, fed: Fed) -> None:
    array[:] = fed.rows


# A sequence keeps its state in the slot of its row; one that begins, or begins again, reads none.
SLOTS = Feature(
    "slots",
    inputs=(
        StepInput("state_read", TensorType(torch.int32, ("B",)), -1, _read),  # -1: it has none yet
        StepInput("state_write", TensorType(torch.int32, ("B",)), -1, _write),
    ),
)
