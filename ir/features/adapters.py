"""The feature of LoRA adapters: the step input that says which adapter each token uses."""

import torch

from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array, RequestView
from ingot.ir.features.step_input import RowTable, StepInput
from ingot.ir.types import TensorType

SLOTS_INPUT = "adapter_slots"


def _slot(sequence: RequestView) -> int | None:
    return None if sequence.adapter_slot < 0 else sequence.adapter_slot


def _fill(array: Array, fed: Fed) -> None:
    array[:] = fed.tables[SLOTS_INPUT][fed.rows[fed.seqs]]


# The states with the factors depend on the model's linears, so the pass insert-adapters adds them.
ADAPTERS = Feature(
    "adapters",
    inputs=(
        StepInput(
            SLOTS_INPUT,  # the slot of each token's adapter; -1: none
            TensorType(torch.int32, ("T",)),
            -1,
            _fill,
            table=RowTable(SLOTS_INPUT, torch.int32, -1, _slot),
        ),
    ),
)
