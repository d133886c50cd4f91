"""Where the tokens of a sequence lie in the paged cache."""

from functools import cache

import numpy as np
import torch

from ingot.ir.cache.groups import FULL, CacheGroup
from ingot.ir.features.asking import Array
from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import TensorType


def _kv_lens(array: Array, fed: Fed) -> None:
    array[:] = fed.known_places + fed.lengths


def _inputs(group: CacheGroup) -> tuple[StepInput, ...]:
    """The page table of a group, and where in its caches the tokens fed are written."""

    def page_table(array: Array, fed: Fed) -> None:
        fed.pages_of(group)[:, : array.shape[1]].take(fed.rows, axis=0, out=array, mode="clip")

    def slots(array: Array, fed: Fed) -> None:
        pages = fed.pages_of(group)[fed.rows[fed.seqs], fed.positions // fed.page_size].astype(np.int64)
        array[:] = pages * fed.page_size + fed.positions % fed.page_size

    return (
        # A page is added while the same sequences decode. Unused entries are 0.
        StepInput(group.page_table, TensorType(torch.int32, ("B", "P")), 0, page_table, varies=True),
        StepInput(group.slots, TensorType(torch.int64, ("T",)), -1, slots, known=False),
    )


PAGING = Feature(
    "paging",
    inputs=(*_inputs(FULL), StepInput("kv_lens", TensorType(torch.int32, ("B",)), 0, _kv_lens, known=False)),
)


@cache
def paging_of(group: CacheGroup) -> Feature:
    """The feature `paging` of a group that gives pages back. There is one for each such group that a model has."""
    return Feature(f"paging_{group.name}", inputs=_inputs(group))
