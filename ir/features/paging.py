"""Where the tokens of a sequence lie in the paged cache."""

import numpy as np
import torch

from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.step_input import Array, StepInput
from ingot.ir.types import TensorType


def _page_table(array: Array, fed: Fed) -> None:
    fed.pages[:, : array.shape[1]].take(fed.rows, axis=0, out=array, mode="clip")


def _slots(array: Array, fed: Fed) -> None:
    pages = fed.pages[fed.rows[fed.seqs], fed.positions // fed.page_size].astype(np.int64)
    array[:] = pages * fed.page_size + fed.positions % fed.page_size


def _kv_lens(array: Array, fed: Fed) -> None:
    array[:] = fed.known_places + fed.lengths


PAGING = Feature(
    "paging",
    inputs=(
        # A page is added while the same sequences decode. Unused entries are 0.
        StepInput("page_table", TensorType(torch.int32, ("B", "P")), 0, _page_table, varies=True),
        StepInput("slots", TensorType(torch.int64, ("T",)), -1, _slots, known=False),
        StepInput("kv_lens", TensorType(torch.int32, ("B",)), 0, _kv_lens, known=False),
    ),
)
